"""Timings: equal rules, nothing lost, and no difference claimed that chance explains."""

import json
import re
import signal

import pytest

from common.errors import UserError
from scripts import report, timings
from scripts.quickstart import LAUNCHERS

SPEEDS = {("device", 1, 4): 100, ("device", 1, 8): 110}
SPEEDS |= {("device", 2, 8): 190, ("data", 1, 4): 99, ("data", 2, 8): 186}


@pytest.fixture
def args(tmp_path, monkeypatch):
    words = ["--device", "cpu", "--batch-size", "4", "--image-size", "32"]
    parsed = timings.parse([*words, "--precision", "fp32", "--output", str(tmp_path)])
    parsed.data, parsed.output = tmp_path / "data", tmp_path / "out"
    parsed.devices, parsed.threads, parsed.workers = [1, 2], 1, 2
    parsed.lap, parsed.steps = 1, 6
    monkeypatch.setattr(timings, "parse", lambda: parsed)
    monkeypatch.setattr(timings, "short_validation", lambda data, folder: data)
    monkeypatch.setattr(timings, "loader_alone", lambda _: {"images_per_second": 9})
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return parsed


def test_a_run_on_two_processes_ends_with_the_table_of_its_file(
    args, monkeypatch, capsys
):
    cell = timings.Cell("device", 2, 8, "fp32")
    runs = [timings.Run(cell, "distributed", 1)]
    monkeypatch.setattr(timings, "plan", lambda args: runs)
    timings.main()
    (file,) = args.output.glob("runs/*.json")
    found = json.loads(file.read_text())
    assert (found["warmup_steps"], found["timed_steps"]) == (1, 6)
    assert found["run"]["world_size"] == 2 and found["run"]["argv"]
    assert 48 / found["images_per_second"] < found["seconds"]  # that is with warm-up
    printed = capsys.readouterr().out
    assert f"{found['images_per_second']:.0f} images/s" in printed
    text = (args.output / "report.md").read_text()
    assert text in printed
    row = rf"\| distributed +\| - +\| {found['images_per_second']:.0f} "
    assert re.search(row, text), text


def test_strategies_of_a_setting_have_equal_flags_and_threads(args):
    by_cell = {}
    for run in timings.plan(args):
        words, added = timings.command(args, run, "out")
        assert words[1].endswith(f"scripts/{run.strategy}.sh")
        threads = int(added.get("NPROC", 1)) * int(added["OMP_NUM_THREADS"])
        by_cell.setdefault(run.cell, set()).add((threads, *words[2:]))
    assert len(by_cell) == 4 and all(len(same) == 1 for same in by_cell.values())


def made(run, speed):
    """What launch() would have found."""
    step = 1000 * run.cell.global_batch_size / speed
    return {
        **run.cell._asdict(),
        **{"strategy": run.strategy, "repeat": run.repeat, "images_per_second": speed},
        **{"step_milliseconds": step, "step_milliseconds_p90": step},
        **{"data_wait_share": 0, "peak_memory_mib": 100, "seconds": 1, "later_loss": 7},
        **{"wall_seconds": 30, "gpu_utilisation": None, "steps_between_looks": 2},
        **{"timed_steps": 8, "run": {"world_size": run.cell.devices}},
        "machine": {"torch": "2", "python": "3", "cpu": "CPU", "cpu_cores": 2},
    }


def test_ctrl_c_and_the_same_command_again_make_each_run_once(args, monkeypatch):
    done = []

    def launch(args, run, log):
        if len(done) == 6:
            done.append(None)
            raise KeyboardInterrupt
        done.append(run)
        return made(run, 100)

    monkeypatch.setattr(timings, "launch", launch)
    with pytest.raises(SystemExit, match="130"):
        timings.main()
    timings.main()
    done.remove(None)
    assert sorted(done) == sorted(timings.plan(args))
    args.batch_size = 8
    with pytest.raises(UserError, match="batch_size 4, now it is 8"):
        timings.main()


def test_a_wrong_flag_ends_with_status_2(capsys):
    with pytest.raises(SystemExit, match="2"):
        timings.parse(["--batch-size", "none"])
    assert "--batch-size: " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "change, verdict",
    [
        ({}, "compute-bound"),
        ({("data", 2, 8): 150}, "input-bound"),  # loaders take the cores
        ({("device", 2, 8): 160, ("data", 2, 8): 159}, "communication-bound"),
    ],
)
def test_only_a_difference_beyond_the_spread_is_claimed(
    args, monkeypatch, change, verdict
):
    """Two repeats, 1 % apart, one way for some strategies, the other for others."""
    factors = {"distributed": 1.015, "horovod_distributed": 0.9}

    def launch(args, run, log):
        up = (run.repeat + list(LAUNCHERS).index(run.strategy)) % 2
        speed = (SPEEDS | change)[run.cell[:3]] * factors.get(run.strategy, 1)
        return made(run, speed * (1.005 if up else 0.995))

    monkeypatch.setattr(timings, "launch", launch)
    timings.open_output(args)
    timings.measure(args)
    found = report.Timings(args.output)
    fast, middle, slow = (
        found.rows["data", 2, 8, "fp32", name]
        for name in ("distributed", "apex_distributed", "horovod_distributed")
    )
    assert found.verdict(middle) == verdict
    assert found.differ(fast, slow) and found.differ(middle, slow)
    assert not found.differ(fast, middle)
