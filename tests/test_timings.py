"""Timings: fair turns, no verdict by chance, and nothing left running."""

import contextlib
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from conftest import TINY, Started, processes_of, wait_until
from played import Played
from ranks import Ranks, run_ranks, train, train_at_gate
from trial import NAMES, SETTINGS, invented, simulated

from benchmarks.timings import __main__ as command
from benchmarks.timings import plan, report, statistics
from benchmarks.timings.measure import pin
from benchmarks.timings.statistics import decide, levels, orders, williams
from common.errors import UserError

TRUTH = dict.fromkeys(NAMES, 0.0)


def session(cohorts, truth=TRUTH, launch=0.001, **more):
    found = [invented(truth, launch, 8, f"{n}") for n in range(1, cohorts + 1)]
    return [c | {"ended": n / cohorts, **more} for n, c in enumerate(found, 1)]


# --- statistics ---


@pytest.mark.parametrize("number", (2, 3, 4, 5))
def test_each_follows_each_other_equally_often_in_an_order_drawn_anew(number):
    names, rows = "abcdef"[:number], len(williams(number))
    drawn = [orders(names, random.Random(seed)) for seed in range(20)]
    blocks = [[next(one) for _ in range(rows)] for one in drawn]
    for cohort in blocks:
        followed = [pair for row in cohort for pair in zip(row, row[1:], strict=False)]
        counts = {pair: followed.count(pair) for pair in followed}
        assert len(counts) == number * (number - 1) and len({*counts.values()}) == 1
    assert len({str(cohort) for cohort in blocks}) > 1


def test_a_level_is_free_of_the_machine_s_slowness_and_of_single_turns():
    """All turns of b take twice as long as a's; the machine slows down in the middle."""
    turns = []
    for slowness in (1, 1, 3, 3, 3, 1, 1):
        turns += [["a", [slowness] * 2, 0.0, []], ["b", [2.0 * slowness], 0.0, []]]
        turns.append(["c", [3.0 * slowness], 0.0, []])
    turns[0][1], turns[7][1] = [9.0], [0.5]
    found = levels({"turns": [*turns, ["d", [5.0], 0.0, []]]}, alone=["d"])
    expected = {"a": 1, "b": 2, "c": 3, "d": 5}
    assert {n: math.exp(log) for n, log in found.items()} == pytest.approx(expected)


def pinned() -> None:
    """Print the cores of a process of rank 1, and those of its child."""
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


def test_two_copies_that_differ_forbid_all_verdicts():
    truth = TRUTH | {"second copy": 0.2, "distributed again": 0.1}
    mode = report.Mode("synthetic", session(6, truth), SETTINGS, last=True)
    assert {v.verdict for v in mode.verdicts} == {"undecided"}
    assert "two copies of distributed differ" in mode.headline()
    good = TRUTH | {"second copy": 0.2}
    mode = report.Mode("synthetic", session(6, good), SETTINGS, last=True)
    assert re.search(r"second copy is 1\d.\d % slower than distr", mode.headline())


def test_too_few_cohorts_give_no_interval():
    two = dict.fromkeys(("distributed", "distributed again"), 0.0)
    for truth, cohorts in ((TRUTH, 1), (two, 2)):
        found = [c | {"ended": c["ended"] / 100} for c in session(cohorts, truth)]
        (copy,) = decide(found, SETTINGS, last=cohorts == 1).copies
        assert copy.verdict == "undecided"
        assert report.interval(copy).endswith("(too few cohorts for an interval)")


def test_all_looks_together_spend_the_error_once(monkeypatch):
    spent = []
    monkeypatch.setattr(
        statistics, "judge", lambda fit, pairs, error: [spent.append(error)]
    )
    for number in (2, 4, 6, 7):
        decide(session(7)[:number], SETTINGS, last=number == 7)
    assert sum(spent[::2]) == sum(spent[1::2]) == pytest.approx(statistics.ERROR)


@pytest.mark.parametrize(
    "slower, launch, draws", [(0.0, 0.02, 400), (0.05, 0.005, 400)]
)
def test_verdicts_are_right_and_a_slowdown_is_found(slower, launch, draws):
    found = simulated(slower, launch, 8, draws)  # the same in each run
    assert found["with_a_wrong_verdict"] + found["without_verdicts"] < 0.04
    assert not slower or found["decided"] > 0.5  # two of three pairs differ


# --- measuring ---


def test_at_the_gate_all_wait_and_no_bit_changes(tmp_path):
    flags = [*TINY, "--synthetic", 24, "--epochs", 1, "--device", "cpu", "--output"]
    how = {"name": "distributed", "flags": [*flags, tmp_path / "a"]}
    run_ranks(tmp_path / "free", 2, train, **how)
    gate = socket.socket(socket.AF_UNIX)
    gate.bind(str(tmp_path / "gate"))
    gate.listen()
    gate.settimeout(60)
    how |= {"flags": [*flags, tmp_path / "b"], "gate": str(tmp_path / "gate")}
    with Ranks(tmp_path / "held", 2, train_at_gate, **how) as ranks:
        connections, counts = [gate.accept()[0] for _ in range(2)], []
        for _ in range(3):
            for one in connections:
                one.settimeout(20)
                counts.append(len(json.loads(one.recv(10**5))["intervals"]))
            time.sleep(0.3)
            assert ranks.alive(0) and ranks.alive(1)
            for one in connections:
                one.sendall(b"2\n")
        ranks.results()
    assert counts == [1, 1, 2, 2, 2, 2]
    weights = (torch.load(tmp_path / n / "checkpoint.pt")["state_dict"] for n in "ab")
    torch.testing.assert_close(*weights, rtol=0, atol=0)


SMALL = "--arch squeezenet1_1 --image-size 32 --batch-size 4 --precision fp32".split()
SMALL += "--modes jpeg --strategies distributed apex_distributed --device cpu".split()


def test_a_cohort_ends_with_a_report(digits, tmp_path, monkeypatch, capsys):
    words = ["--minutes", "0.1", "--data", str(digits), "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["timings", *words, *SMALL])
    monkeypatch.setattr(command, "cohort", partial(command.cohort, seconds=3))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("TEST_RUN", str(tmp_path))
    command.main()
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["minutes"] > 0 and found["device"] and found["verdicts"] == []
    assert "CUDA GPU" in found["problems"]["apex_distributed"]
    (cohort,) = report.read_cohorts(tmp_path)
    names = [turn[0] for turn in cohort["turns"]]
    assert names.count("distributed") == names.count("distributed again") > 0
    assert "nothing was decided" in capsys.readouterr().out
    ElementTree.parse(tmp_path / "timings.svg")
    assert not processes_of(str(tmp_path))


def test_nothing_outlives_a_killed_measurement(digits, tmp_path):
    words = ["-m", "benchmarks.timings", "--data", str(digits), *SMALL]
    words += ["--output", str(tmp_path / "out")]

    def stopped():
        found = 0
        for process in processes_of(str(tmp_path)):
            with contextlib.suppress(OSError):  # it ended just now
                found += ") T " in Path(f"/proc/{process}/stat").read_text()
        return found > 4

    with Started(tmp_path, [sys.executable, *words]) as measuring:
        wait_until(stopped, 90, "a training with its loaders is stopped")
        measuring.process.kill()
        measuring.process.wait()
        measuring.wait_until_gone(20)


# --- the command ---


@pytest.fixture
def args(tmp_path, monkeypatch):
    args = plan.parse(
        ["--modes", "synthetic", "--output", str(tmp_path), "--device", "cpu"]
    )
    args.minutes, args.strategies, args.shown = 1, NAMES[:-1], []
    monkeypatch.setattr(plan, "parse", lambda: args)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(command.time, "monotonic", iter(range(10**6)).__next__)
    return args


def test_ctrl_c_and_the_same_command_again(args, monkeypatch, capsys):
    made = []

    def cohort(candidates, after_turn):
        made.append([one.name for one in candidates])
        if len(made) == 4:
            raise KeyboardInterrupt
        truth = TRUTH | {"third copy": 0.0 if len(made) < 4 else 0.01}
        turns = invented(truth, 0.03, 8, f"{len(made)}")["turns"]
        turns = [[*turn, 0.0, []] for turn in turns]
        return {"turns": turns, "problems": {}, "start_seconds": 1, "seconds": 6}

    monkeypatch.setattr(command, "cohort", cohort)
    with pytest.raises(SystemExit, match="130"):
        command.main()
    assert "the same command continues" in capsys.readouterr().err
    assert len(report.read_cohorts(args.output)) == 3
    command.main()
    cohorts = report.read_cohorts(args.output)
    assert len(cohorts) == len(made) - 1 > 4
    ended = [one["ended"] for one in cohorts]
    assert ended == sorted(ended) and 0.7 < ended[-1] <= 1
    args.batch_size = 8
    with pytest.raises(UserError, match="batch_size 32, now it is 8"):
        command.main()


def test_the_report_names_a_library_that_is_only_a_folder(tmp_path, monkeypatch):
    (tmp_path / "amp_C").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert report.machine("cpu")["amp_C"] == "installed"


def test_strategies_have_equal_flags_and_threads(args):
    every = plan.candidates(args, "jpeg")
    assert [one.name for one in every] == [*args.strategies, "distributed again"]
    assert len({str(one.command[2:]) for one in every}) == 1
    assert len({one.variables["OMP_NUM_THREADS"] for one in every}) == 1
    alone = plan.candidate(args, "dataparallel", "jpeg")
    assert int(alone.variables["OMP_NUM_THREADS"]) == args.processes * args.threads


@pytest.mark.parametrize("total, groups", [(90, 1), (30, 3)])
def test_gpu_memory_decides_whether_all_are_resident(args, monkeypatch, total, groups):
    args.device, used = "cuda", iter([0, 10])
    asked = {"memory.total": total}
    monkeypatch.setattr(plan, "gpu_names", lambda: ["0", "1"])
    monkeypatch.setattr(plan, "gpus", lambda: [{"memory.used": next(used), **asked}])
    monkeypatch.setattr(plan, "Job", lambda *_: Namespace(problem=None))
    monkeypatch.setattr(plan, "wait", lambda *_: None)
    found = plan.groups(args, "synthetic")
    assert len(found) == groups and all(one[0].name == "distributed" for one in found)


def test_a_step_is_split_into_parts_that_add_up(args):
    args.processes = 2
    names = [one.name for one in plan.candidates(args, "scaling")]
    times = dict(zip(names, (0.0, -0.5, 0.0, -0.5, -0.3), strict=True))
    mode = report.Mode("scaling", session(4, times), vars(args), last=True)
    shares = re.findall(r"(\d+)%[,.]", mode.scaling().rpartition("A step")[2])
    assert len(shares) == 3 and abs(sum(map(int, shares)) - 100) <= 2
