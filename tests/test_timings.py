"""Timings take fair turns, reach no verdict by chance, and leave no process running."""

import json
import math
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, TINY, Started, processes_of, run, wait_until
from played import Played
from ranks import Ranks, run_ranks, train

from benchmarks.processes import end, send
from benchmarks.timings import gate, plan, report, session, statistics
from benchmarks.timings.__main__ import parse
from benchmarks.timings.measure import Candidate, cohort, pin
from benchmarks.timings.statistics import decide, levels, orders, williams
from benchmarks.timings.trial import NAMES, SETTINGS, invented, simulated
from common import meters
from common.errors import UserError

TRUTH = dict.fromkeys(NAMES, 0.0)


def several(cohorts, truth=TRUTH):
    found = [invented(truth, 0.001, 8, f"{n}") for n in range(1, cohorts + 1)]
    return [c | {"ended": n / cohorts} for n, c in enumerate(found, 1)]


# --- statistics ---


@pytest.mark.parametrize("number", (3, 4))
def test_each_follows_each_other_equally_often_in_an_order_drawn_anew(number):
    names, rows = "abcdef"[:number], len(williams(number))
    drawn = [orders(names, random.Random(seed)) for seed in range(20)]
    blocks = [[next(one) for _ in range(rows)] for one in drawn]
    for block in blocks:
        followed = [pair for row in block for pair in zip(row, row[1:], strict=False)]
        counts = {pair: followed.count(pair) for pair in followed}
        assert len(counts) == number * (number - 1) and len({*counts.values()}) == 1
    assert len({str(block) for block in blocks}) > 1


def test_a_level_is_free_of_the_machine_s_slowness_and_of_single_turns():
    """A turn of b takes twice as long as one of a; halfway through, the machine slows down."""
    turns = []
    for slowness in (1, 1, 3, 3, 3, 1, 1):
        turns += [["a", [slowness] * 2, 0.0], ["b", [2.0 * slowness], 0.0]]
        turns.append(["c", [3.0 * slowness], 0.0])
    turns[0][1], turns[7][1] = [9.0], [0.5]
    turns += [["d", [seconds], 0.0] for seconds in (5.0, 4.0, 90.0)]
    found = levels({"turns": turns}, alone=["d"])
    expected = {"a": 1, "b": 2, "c": 3, "d": 5}
    assert {n: math.exp(log) for n, log in found.items()} == pytest.approx(expected)


def test_two_copies_that_differ_forbid_all_verdicts():
    truth = TRUTH | {"second copy": 0.2, "distributed again": 0.1}
    mode = report.Mode("synthetic", several(6, truth), SETTINGS, last=True)
    assert {v.verdict for v in mode.verdicts} == {"undecided"}
    assert "two copies of distributed differ" in mode.headline()
    truth["distributed again"] = 0.0
    mode = report.Mode("synthetic", several(6, truth), SETTINGS, last=True)
    assert re.search(r"second copy is 1\d.\d % slower than distr", mode.headline())


def test_all_looks_together_spend_the_error_once(monkeypatch):
    spent = []
    judge = lambda fit, pairs, error: [spent.append(error)]  # noqa: E731
    monkeypatch.setattr(statistics, "judge", judge)
    for number in (2, 4, 6, 7):
        decide(several(7)[:number], SETTINGS, last=number == 7)
    assert sum(spent[::2]) == sum(spent[1::2]) == pytest.approx(statistics.ERROR)


@pytest.mark.parametrize("slower, launch", [(0.0, 0.02), (0.05, 0.005)])
def test_verdicts_are_right_and_a_slowdown_is_found(slower, launch):
    found = simulated(slower, launch, cohorts=8, draws=400)  # always equal
    assert found["with_a_wrong_verdict"] + found["without_verdicts"] < 0.04
    assert not slower or found["decided"] > 0.5  # two of three pairs differ


# --- measuring ---

# Two ranks with invented times: all three intervals of a turn differ
INVENTED = """
import os
from benchmarks.timings import gate
rank = int(os.fork() == 0)
gate.place = lambda: (rank, 2)
gate.after_interval(1, 100.0, 8, 0.0)
turn = 0
while True:
    kept = (50.0, 50.0) if turn == 0 else (3.0, 2.0) if rank else (1.0, 4.0)
    for seconds, number in zip((100.0, *kept), (2, 3, 1 if turn == 2 else 4)):
        gate.after_interval(number, seconds, 8, 0.9 if rank else 0.3)
    turn += 1
"""


def test_of_a_turn_the_slowest_rank_counts_without_what_a_start_slows_down():
    """A job's first turn does not count, nor does the first interval of a turn or an epoch."""
    code = [sys.executable, "-c", INVENTED]
    wrong = [sys.executable, "-c", "raise SystemExit('a.py: error: no such thing')"]
    found = cohort([Candidate("a", code, {}), Candidate("b", wrong, {})], seconds=0.5)
    assert found["problems"] == {"b": "no such thing"}
    assert {turn[0] for turn in found["turns"]} == {"a"}
    times = [turn[1] for turn in found["turns"]]
    assert times[0] == [3 / 8, 4 / 8] and times[1] == [3 / 8]
    assert found["turns"][0][2] == pytest.approx((0.6 / 3 + 0.6 / 4) / 2)
    assert len(times) > 2 and times[2:] == [[3 / 8, 4 / 8]] * (len(times) - 2)


def pinned() -> None:
    """Print the cores of rank 1's process, and the cores of its child."""
    with subprocess.Popen(["sleep", "60"]) as child:
        one, _ = socket.socketpair()
        pin(one, rank=1, number=1)
        print(*(os.sched_getaffinity(pid) for pid in (0, child.pid)), sep="\n")
        child.kill()


def test_a_process_and_its_loaders_stay_on_the_cores_of_its_rank(tmp_path):
    every = sorted(os.sched_getaffinity(0))
    with Played(tmp_path) as played:
        played.start(pinned)
        assert played.end() == [0]
        assert played.log(0) == 2 * f"{ {every[1 % len(every)]} }\n"


def train_at_gate(path: str, **how) -> None:
    os.environ[gate.VARIABLE] = path
    gate.attach(meters.Progress)
    train(**how)


def test_at_the_gate_all_wait_and_no_bit_changes(tmp_path):
    flags = [*TINY, "--synthetic", 24, "--epochs", 1, "--output"]
    how = {"name": "distributed", "flags": [*flags, tmp_path / "a"]}
    run_ranks(tmp_path / "free", 2, train, **how)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "gate"))
    listener.listen()
    listener.settimeout(120)
    how |= {"flags": [*flags, tmp_path / "b"], "path": str(tmp_path / "gate")}
    with Ranks(tmp_path / "held", 2, train_at_gate, **how) as ranks:
        connections, arrived = [listener.accept()[0] for _ in range(2)], []
        for _ in range(3):
            for one in connections:
                one.settimeout(60)
                message = json.loads(one.recv(10**5))
                intervals = message.pop("intervals")
                arrived.append([*message.values(), len(intervals), intervals[0][2]])
            # The processes neither end nor report another turn
            assert select.select(connections, [], [], 1)[0] == []
            for one in connections:
                one.sendall(b"2\n")
        ranks.results()
    assert sorted(arrived[:2]) == [[0, 2, 1, 4], [1, 2, 1, 4]]  # images of both ranks
    assert [one[2] for one in arrived] == [1, 1, 2, 2, 2, 2]
    weights = (torch.load(tmp_path / n / "checkpoint.pt")["state_dict"] for n in "ab")
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_a_signal_reaches_one_candidate_and_the_end_reaches_all(tmp_path):
    paths, sleep = [tmp_path / "a", tmp_path / "a-again"], ["sleep", "60"]
    a, b = (subprocess.Popen(sleep, env={gate.VARIABLE: str(x)}) for x in paths)
    assert send(paths[0], signal.SIGTERM) and a.wait() == -signal.SIGTERM
    end(tmp_path)
    assert b.wait() == -signal.SIGKILL


def test_nothing_outlives_a_killed_measurement(digits, tmp_path):
    words = "-m benchmarks.timings --modes jpeg --strategies distributed --processes 1 "
    words += "--arch squeezenet1_1 --image-size 32 --batch-size 4 --precision fp32"
    where = ["--data", digits, "--output", tmp_path / "out"]

    def stopped():
        states = processes_of(str(tmp_path)).values()
        return sum(state.startswith("T") for state in states) > 2

    with Started(tmp_path, [sys.executable, *words.split(), *where]) as measuring:
        wait_until(stopped, 180, "a training with its loaders is stopped")
        measuring.process.kill()
        measuring.process.wait()
        measuring.wait_until_gone(20)


# --- the command ---


def test_help_lists_the_flags_before_anything_is_installed(tmp_path):
    bare = tmp_path / "python"  # without site-packages
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    done = run("bash", ROOT / "scripts" / "timings.sh", "--help", PYTHON=str(bare))
    assert done.returncode == 0 and "--modes NAME" in done.stdout, done.stderr


@pytest.fixture
def args(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    args = parse(["--modes", "synthetic", "--output", str(tmp_path)])
    args.minutes = 1
    plan.complete(args)
    args.strategies, args.shown = NAMES[:-1], []
    monkeypatch.setattr(plan, "complete", lambda args: None)
    monkeypatch.setattr(session.time, "monotonic", iter(range(10**6)).__next__)
    return args


def test_ctrl_c_and_the_same_command_again(args, monkeypatch, capsys):
    made = []

    def measured(candidates):
        made.append([one.name for one in candidates])
        if len(made) == 4:
            raise KeyboardInterrupt
        truth = TRUTH | {"third copy": 0.0 if len(made) < 4 else 0.01}
        turns = invented(truth, 0.03, 8, f"{len(made)}")["turns"]
        turns = [[*turn, 0.0] for turn in turns]
        return {"turns": turns, "problems": {}, "start_seconds": 1, "seconds": 6}

    monkeypatch.setattr(session, "cohort", measured)
    with pytest.raises(SystemExit, match="130"):
        session.run(args)
    assert "run the same command to continue" in capsys.readouterr().err
    assert len(report.read_cohorts(args.output)) == 3
    session.run(args)
    cohorts = report.read_cohorts(args.output)
    assert len(cohorts) == len(made) - 1 > 4
    ended = [one["ended"] for one in cohorts]
    assert ended == sorted(ended) and 0.7 < ended[-1] <= 1
    args.batch_size = 8
    with pytest.raises(UserError, match="batch_size 32, not 8"):
        session.run(args)


def test_a_mode_without_any_strategy_is_an_error_after_the_report(
    args, monkeypatch, capsys
):
    def measured(candidates):
        bad = "--data" in candidates[0].command
        turns = [[*turn, 0.0] for turn in invented(TRUTH, 0.0, 8, "a")["turns"]]
        problems = {name: "no such image" for name in NAMES} if bad else {}
        return {"turns": [] if bad else turns, "problems": problems, "seconds": 6}

    args.modes, args.data = ["synthetic", "jpeg"], args.output
    monkeypatch.setattr(session, "cohort", measured)
    with pytest.raises(UserError, match="jpeg: there is no strategy left to time"):
        session.run(args)
    printed = capsys.readouterr().out
    assert "jpeg: distributed is left out: no such image" in printed
    assert "\n## synthetic\n" in printed and (args.output / "report.md").exists()


def test_strategies_share_flags_threads_and_loader_processes(args):
    args.threads = args.workers = 3
    args.strategies = ["distributed", "horovod_distributed"]
    every = plan.candidates(args, "jpeg")
    assert [one.name for one in every] == [*args.strategies, "distributed again"]
    assert len({str(one.command[2:]) for one in every}) == 1
    assert {one.variables["OMP_NUM_THREADS"] for one in every} == {"3"}

    def flag(one: Candidate, name: str) -> str:
        return one.command[one.command.index(name) + 1]

    alone = plan.candidate(args, "dataparallel", "jpeg")
    processes = args.processes
    assert int(alone.variables["OMP_NUM_THREADS"]) == 3 * processes
    assert int(flag(alone, "--workers")) == processes * int(flag(every[0], "--workers"))
    for precision, level in (("fp16", "O1"), ("fp32", "O0")):
        args.precision = precision
        apex = plan.candidate(args, "apex_distributed", "jpeg")
        assert flag(apex, "--opt-level") == level


def test_the_report_gives_images_per_second_and_the_page_cache(args):
    args.device, args.precision = "cuda", "fp16"
    (cache,) = report.notes({**vars(args), "modes": ["jpeg"], "shown": []})
    assert "64 generated images, which stay in memory" in cache
    assert "apex_distributed" not in plan.skipped(args)
    args.precision = "bf16"
    assert {*plan.skipped(args)} == {"apex_distributed", "dataparallel"}
    turns = [["distributed", [1 / 80, 1 / 80], share] for share in (0.0, 0.3)]
    mode = report.Mode("jpeg", [{"turns": turns, "ended": 1}], SETTINGS, last=True)
    assert mode.speeds() == [["distributed", "80.0", "-", "15%"]]


def test_efficiency_is_per_device(args):
    args.processes = 2
    names = [one.name for one in plan.candidates(args, "scaling")]
    assert names == ["1 x 32", "2 x 32", "1 x 64", "2 x 32 again"]
    times = dict(zip(names, (1 / 50, 1 / 80, 1 / 40, 1 / 80), strict=True))
    turns = [[name, [seconds] * 2, 0.0] for name, seconds in times.items()]
    cohorts = [{"turns": turns, "ended": n / 4} for n in range(1, 5)]
    text = report.Mode("scaling", cohorts, vars(args), last=True).scaling()
    shares = re.findall(r"\| (\d x \d+) +\| (\d x \d+) +\| ([\d.]+)%", text)
    assert shares == [("2 x 32", "1 x 32", "80.0"), ("2 x 32", "1 x 64", "100.0")]
