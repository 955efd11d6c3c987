"""Timings: equal rules, nothing lost, and a report that says what the numbers say."""

import json
import math
import re
import shutil
import signal
import sys
import threading
from itertools import groupby
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import report
import timings
from quickstart import LAUNCHERS

from common.errors import UserError

RESULTS = ROOT / "results" / "timings"


@pytest.fixture
def args(tmp_path):
    words = ["--device", "cpu", "--batch-size", "4", "--image-size", "32"]
    parsed = timings.parse([*words, "--precision", "fp32", "--output", str(tmp_path)])
    parsed.data = tmp_path / "data"
    parsed.devices, parsed.threads, parsed.workers = [1, 2], 1, 2
    return parsed


@pytest.fixture
def launches(tmp_path, monkeypatch):
    """A function that puts a script of one line in the place of a launch script."""

    def put(strategy, text):
        folder = tmp_path / "scripts"
        folder.mkdir()
        (folder / f"{strategy}.sh").write_text(text)
        monkeypatch.setattr(timings, "ROOT", tmp_path)

    return put


# --- the runs ---


def test_every_setting_is_run_by_all_strategies_in_turns(args):
    for device, more in (("cpu", set()), ("cuda", {("data", 1, 4)})):
        args.device = device
        runs = timings.plan(args)
        batch = 16 if device == "cuda" else 8  # shared out by strong scaling
        cells = {("device", 1, 4), ("device", 2, 8), ("data", 2, 8), *more}
        cells |= {("device", 1, batch), ("device", 2, batch)}
        assert {run.cell[:3] for run in runs} == cells
        assert len({run.name for run in runs}) == len(set(runs)) == len(runs)
        turns = [list(turn) for _, turn in groupby(runs, lambda run: run.cell)]
        assert len(turns) == len(cells) * args.repeats
        for turn in turns:
            expected = set(LAUNCHERS)
            if device == "cpu" and turn[0].cell.devices == 1:
                expected.remove("dataparallel")  # the same as on two
            assert {run.strategy for run in turn} == expected
            assert len(turn) == len(expected)
        orders = {tuple(run.strategy for run in turn) for turn in turns}
        assert len(orders) > 2


def test_strategies_of_a_setting_have_equal_flags_and_threads(args, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    by_cell = {}
    for run in timings.plan(args):
        words, added = timings.command(args, run, "out")
        assert words[1].endswith(f"scripts/{run.strategy}.sh")
        processes = int(added.get("NPROC", 1))
        assert ("NPROC" in added) == (run.strategy != "dataparallel")
        threads = processes * int(added["OMP_NUM_THREADS"])
        by_cell.setdefault(run.cell, set()).add((threads, *words[2:]))
    for cell, found in by_cell.items():
        assert len(found) == 1
        ((threads, *flags),) = found
        assert threads == cell.devices * args.threads
        size = flags[flags.index("--global-batch-size") + 1]
        assert size == str(cell.global_batch_size)
        assert ("--synthetic" in flags) == (cell.mode == "device")


def test_gpus_are_the_first_of_those_that_are_visible(args, monkeypatch):
    args.device = "cuda"
    run = timings.Run(timings.Cell("device", 2, 8, "fp16"), "distributed", 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    assert timings.command(args, run, "out")[1]["CUDA_VISIBLE_DEVICES"] == "3,5"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert timings.command(args, run, "out")[1]["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_one_run_for_real(args, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")  # the user's own does not count
    args.lap, args.steps = 1, 3
    monkeypatch.setenv("LAUNCHER", "none")  # of this command, not of its runs
    run = timings.Run(timings.Cell("device", 2, 4, "fp32"), "dataparallel", 1)
    found = timings.launch(args, run, tmp_path / "log")
    assert found["warmup_steps"] == 1 and found["timed_steps"] == 3
    assert found["run"]["threads_per_process"] == 2
    assert found["run"]["argv"][0] == "dataparallel.py"
    assert found["data_wait_share"] < 0.5 and found["gpu_utilisation"] is None
    assert 12 / found["images_per_second"] < found["seconds"]  # that is with warm-up
    assert found["step_milliseconds_p90"] >= found["step_milliseconds"]
    assert 0 < found["later_loss"] != found["first_loss"] < 20
    assert found["wall_seconds"] > found["seconds"]
    assert found["machine"]["torch"] and found["machine"]["cpu"]


def test_a_strategy_that_cannot_run_says_why(args, tmp_path):
    run = timings.Run(timings.Cell("device", 1, 4, "fp32"), "apex_distributed", 1)
    with pytest.raises(timings.Failed, match="Apex needs a CUDA GPU") as caught:
        timings.launch(args, run, tmp_path / "log")
    assert caught.value.unavailable


def test_horovod_that_is_there_and_stops_is_tried_again(args, tmp_path, launches):
    """Status 2 alone does not say that the library is missing."""
    launches("horovod_distributed", "echo 'x.py: error: no such folder' >&2; exit 2\n")
    run = timings.Run(timings.Cell("device", 1, 4, "fp32"), "horovod_distributed", 1)
    with pytest.raises(timings.Failed, match="^no such folder$") as caught:
        timings.launch(args, run, tmp_path / "log")
    assert not caught.value.unavailable


def test_a_run_that_hangs_is_ended(args, tmp_path, launches, monkeypatch):
    launches("distributed", "exec sleep 100\n")
    monkeypatch.setattr(timings, "SECONDS", 0.5)
    run = timings.Run(timings.Cell("device", 1, 4, "fp32"), "distributed", 1)
    with pytest.raises(timings.Failed, match="not over after 0.5 s") as caught:
        timings.launch(args, run, tmp_path / "log")
    assert not caught.value.unavailable


@pytest.mark.parametrize(
    ("gpus", "devices"), [(1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])]
)
def test_all_gpus_are_used(monkeypatch, gpus, devices):
    monkeypatch.setattr(timings, "usable_gpus", lambda: gpus)
    assert timings.parse([]).devices == devices


def test_gpu_samples_are_of_the_timed_steps(tmp_path, monkeypatch):
    pynvml = pytest.importorskip("pynvml")
    asked = []

    def rates(handle):
        asked.append(handle)
        if len(asked) == 6:  # the next look finds the last step done
            (tmp_path / "checkpoint.pt.tmp").touch()
        busy = 0 if len(asked) <= 2 else 60 if handle == "GPU 0" else 80
        return SimpleNamespace(gpu=busy)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", "GPU {}".format)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", str)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", rates)
    samples = timings.GpuSamples(tmp_path, ["0", "GPU-5f"])
    samples.start()
    samples.join(10)
    assert asked == 3 * ["GPU 0", "GPU-5f"]
    assert samples.mean(0.4) == 70 and samples.mean(9) == pytest.approx(280 / 6)


@pytest.mark.filterwarnings("error")
def test_without_nvml_there_are_no_samples(tmp_path, monkeypatch):
    pynvml = pytest.importorskip("pynvml")
    asked = []

    def no_driver():
        asked.append(True)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    samples = timings.GpuSamples(tmp_path, ["0"])
    samples.start()
    assert samples.mean(9) is None and asked


def test_a_strategy_that_fails_names_its_log(args, tmp_path, launches):
    launches("distributed", "echo something; exit 7\n")
    run = timings.Run(timings.Cell("device", 1, 4, "fp32"), "distributed", 1)
    with pytest.raises(timings.Failed, match=r"exit status 7, see .*/log") as caught:
        timings.launch(args, run, tmp_path / "log")
    assert not caught.value.unavailable
    assert (tmp_path / "log").read_text() == "something\n"


def test_a_run_that_is_all_warm_up_is_no_figure(args, tmp_path):
    args.lap, args.steps = 2, 0
    run = timings.Run(timings.Cell("device", 1, 4, "fp32"), "dataparallel", 1)
    with pytest.raises(timings.Failed, match="all 2 steps were warm-up: more images"):
        timings.launch(args, run, tmp_path / "log")


def test_no_samples_are_taken_after_a_run_that_failed(
    args, tmp_path, launches, monkeypatch
):
    """The threads of a failed run would go on for ever."""
    pynvml = pytest.importorskip("pynvml")
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", int)
    idle = SimpleNamespace(gpu=0)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", lambda gpu: idle)
    launches("distributed", "exit 7\n")
    args.device = "cuda"
    run = timings.Run(timings.Cell("device", 1, 4, "fp32"), "distributed", 1)
    with pytest.raises(timings.Failed, match="exit status 7"):
        timings.launch(args, run, tmp_path / "log")
    threads = [t for t in threading.enumerate() if isinstance(t, timings.GpuSamples)]
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)


def test_loaders_alone_for_real(args, pictures):
    """8 batches of 8 images, 4 of them before the clock runs."""
    args.data, args.loader_steps = pictures, 8
    args.devices, args.batch_size = [1], 2
    found = timings.loader_alone(args)
    assert found["images"] == 8 and found["images_per_second"] > 0
    args.loader_steps = 4
    with pytest.raises(timings.Failed, match="4 batches are none beyond the 4 of"):
        timings.loader_alone(args)


def made(run, speed, wait=0.0, loss=7.0):
    """What launch() would have found."""
    batch = run.cell.global_batch_size
    return {
        **run.cell._asdict(),
        "strategy": run.strategy,
        "repeat": run.repeat,
        "images_per_second": speed,
        "step_milliseconds": 1000 * batch / speed,
        "step_milliseconds_p90": 1100 * batch / speed,
        "data_wait_share": wait,
        "peak_memory_mib": 100.0,
        "seconds": 1.0,
        "later_loss": loss,
        "wall_seconds": 30.0,
        "gpu_utilisation": None,
        "steps_between_looks": 2,
        "timed_steps": 8,
        "run": {"world_size": run.cell.devices},
        "machine": {"torch": "2", "python": "3", "cpu": "CPU", "cpu_cores": 2},
    }


@pytest.fixture
def measured(args, monkeypatch):
    """A function that runs measure() with a made launch()."""

    def measure(launch):
        monkeypatch.setattr(timings, "loader_alone", lambda _: {"images_per_second": 9})
        monkeypatch.setattr(timings, "launch", lambda args, run, log: launch(run))
        timings.open_output(args)
        timings.measure(args)
        return report.Timings(args.output)

    return measure


def test_interrupted_it_goes_on_with_what_is_missing(measured, args):
    launched = []

    def launch(run):
        launched.append(run)
        if len(launched) == 7:
            raise KeyboardInterrupt
        return made(run, 100.0)

    with pytest.raises(KeyboardInterrupt):
        measured(launch)
    measured(launch)
    assert sorted(launched) == sorted([*timings.plan(args), launched[6]])


def test_a_failure_does_not_end_the_others(measured, args):
    launched = []

    def launch(run):
        launched.append(run.strategy)
        if run.strategy == "apex_distributed":
            raise timings.Failed("no GPU", unavailable=True)
        if run.strategy == "distributed":
            raise timings.Failed("broke", unavailable=False)
        return made(run, 100.0)

    found = measured(launch)
    assert launched.count("apex_distributed") == 1  # it would not fare better later
    assert launched.count("distributed") == launched.count("horovod_distributed") > 1
    table = report.main_table(found, "fp32")
    assert re.search(r"\| apex_distributed .*\| no GPU +\|", table)
    assert re.search(r"\| distributed .*\| broke +\|", table)
    failed = timings.measure(args)
    assert len(failed) == len([r for r in timings.plan(args) if "-dist" in r.name])
    assert {name.split("-")[-2] for name in failed} == {"distributed"}


def test_a_failure_shows_in_the_exit_status(args, tmp_path, monkeypatch, capsys):
    """Of the command as a whole, once the others are done."""
    words = ["timings.py", "--device", "cpu", "--output", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [*words, "--data", str(tmp_path / "data")])
    monkeypatch.setattr(timings, "short_validation", lambda data, folder: folder)
    monkeypatch.setattr(timings, "loader_alone", lambda _: {"images_per_second": 9})
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    wrong = set()

    def launch(args, run, log):
        if run.strategy in wrong:
            raise timings.Failed("broke", unavailable=False)
        return made(run, 100.0)

    monkeypatch.setattr(timings, "launch", launch)
    timings.main()
    shutil.rmtree(tmp_path / "out")
    wrong.add("distributed")
    with pytest.raises(SystemExit) as ended:
        timings.main()
    assert ended.value.code == 1
    printed = capsys.readouterr()
    assert re.search(r"failed: .*-distributed-1,.*the same command", printed.err)
    assert re.search(r"\| distributed .*\| broke +\|", printed.out)


def test_a_folder_that_cannot_be_made_is_one_line(args, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    words = [
        "timings.py",
        "--device",
        "cpu",
        "--output",
        str(tmp_path / "file" / "out"),
    ]
    monkeypatch.setattr(sys, "argv", [*words, "--data", str(tmp_path)])
    monkeypatch.setattr(timings, "short_validation", lambda data, folder: folder)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(UserError, match="file/out.*: Not a directory"):
        timings.main()


def test_loaders_that_fail_do_not_end_the_others(measured, args, monkeypatch):
    def fails(_):
        raise timings.Failed("no space", unavailable=False)

    def launch(run):
        return made(run, 100.0)

    measured(launch)
    (args.output / "loader.json").unlink()
    monkeypatch.setattr(timings, "loader_alone", fails)
    timings.measure(args)
    found = report.Timings(args.output)
    assert found.problems == {"loader alone": "no space"}
    text = report.markdown(found)
    assert "loaders alone were not timed" in text and "loader alone: no space" in text


def test_what_was_found_out_before_ctrl_c_is_kept(measured, args):
    def launch(run):
        if run.strategy == "apex_distributed":
            raise timings.Failed("no GPU", unavailable=True)
        if run.cell.mode == "data":
            raise KeyboardInterrupt
        return made(run, 100.0)

    with pytest.raises(KeyboardInterrupt):
        measured(launch)
    found = report.Timings(args.output)
    assert found.problems == {"apex_distributed fp32": "no GPU"}
    table = report.main_table(found, "fp32")
    assert "no GPU" in table and "not measured" in table


def test_other_settings_do_not_mix(measured, args):
    measured(lambda run: made(run, 100.0))
    args.batch_size = 8
    with pytest.raises(UserError, match="batch_size 4, now it is 8"):
        timings.open_output(args)


# --- the report ---


SPEEDS = {
    ("device", 1, 4): 100.0,
    ("device", 1, 8): 110.0,
    ("device", 2, 8): 190.0,
    ("data", 1, 4): 99.0,
    ("data", 2, 8): 186.0,
}


def speed(run, strategies=None):
    """Two repeats, 1 % apart: one way for some strategies, the other way for others."""
    base = SPEEDS[run.cell[:3]] * (strategies or {}).get(run.strategy, 1)
    up = (run.repeat + list(LAUNCHERS).index(run.strategy)) % 2
    return base * (1.005 if up else 0.995)


def row_of(found, strategy, mode="data", devices=2, batch=8):
    return found.rows[(mode, devices, batch, "fp32", strategy)]


def test_efficiency_is_against_the_same_strategy_alone(measured, args):
    args.full = True  # from JPEG files on one device, too
    found = measured(lambda run: made(run, speed(run)))
    row = row_of(found, "distributed", "device")
    assert found.efficiency(row, 4) == pytest.approx(0.95)
    assert found.efficiency(row, 8) == pytest.approx(190 / 220)
    assert found.lost_to_devices(row_of(found, "distributed")) == pytest.approx(0.05)
    assert "190 (95%)" in report.scaling_table(found, "fp32", weak=True)
    assert "190 (86%)" in report.scaling_table(found, "fp32", weak=False)
    assert "186 (94%)" in report.markdown(found)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "compute-bound"),
        ({("data", 2, 8): 150.0}, "input-bound"),  # loaders take the cores
        ({("device", 2, 8): 160.0, ("data", 2, 8): 159.0}, "communication-bound"),
    ],
)
def test_verdict(measured, monkeypatch, change, verdict):
    for key, value in change.items():
        monkeypatch.setitem(SPEEDS, key, value)
    found = measured(lambda run: made(run, speed(run)))
    assert found.verdict(row_of(found, "distributed")) == verdict


def test_waiting_makes_a_run_input_bound(measured):
    found = measured(lambda run: made(run, speed(run), wait=0.13))
    assert found.verdict(row_of(found, "distributed")) == "input-bound"


def test_differences_within_the_spread_are_not_claimed(measured):
    factors = {"distributed": 1.015, "horovod_distributed": 0.9}
    found = measured(lambda run: made(run, speed(run, factors)))
    assert found.error("data") == pytest.approx(0.00707, rel=0.01)
    assert found.ratio_error("data") == pytest.approx(0.01155, rel=0.01)
    fast, middle, slow = (
        row_of(found, name)
        for name in ("distributed", "apex_distributed", "horovod_distributed")
    )
    assert found.differ(fast, slow) and found.differ(middle, slow)
    assert not found.differ(fast, middle)
    text = report.conclusion(found, "fp32")
    assert "distributed reached 189 images/s, faster than horovod_distributed" in text
    assert "by 13%" in text and "dataparallel" not in text
    others = "multiprocessing_distributed and apex_distributed"
    assert f"Its lead over {others} may be chance." in text


def test_quantiles_of_students_t():
    """Against tables, 99 % two-sided; the series is some 5 % low for 3."""
    for freedom, expected in ((3, 5.841), (6, 3.707), (12, 3.055), (30, 2.750)):
        found = report.t_quantile(freedom)
        assert found == pytest.approx(expected, rel=0.06 if freedom == 3 else 0.01)
    assert report.t_quantile(0) == math.inf
    assert report.t_quantile(10**6) == pytest.approx(2.576, rel=1e-3)


def test_timings_of_an_earlier_version_are_refused(measured, args):
    measured(lambda run: made(run, speed(run)))
    file = min((args.output / "runs").glob("*.json"))
    content = json.loads(file.read_text())
    del content["later_loss"]
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="by an earlier scripts/timings.py"):
        report.Timings(args.output)


def test_a_machine_that_slows_down_hides_no_difference(measured):
    """It slows all strategies of a turn alike."""
    factors = {"horovod_distributed": 0.9}

    def launch(run):
        return made(run, speed(run, factors) * (0.7 if run.repeat == 2 else 1))

    found = measured(launch)
    assert found.error("data") > 0.2 and found.ratio_error("data") < 0.02
    one, other = row_of(found, "distributed"), row_of(found, "horovod_distributed")
    assert found.differ(one, other) and report.faster(one, other) > 0.1
    assert found.verdict(one) == "undecided"  # that compares one turn with another


def test_one_process_is_no_verdict_on_dataparallel(measured):
    found = measured(lambda run: made(run, speed(run, {"dataparallel": 2})))
    assert found.verdict(row_of(found, "dataparallel")) == "one process, no replicas"
    assert re.search(
        r"\| dataparallel +\| - +\| 380 +\|",
        report.scaling_table(found, "fp32", weak=True),
    )
    assert "dataparallel" not in report.conclusion(found, "fp32")


def test_two_rows_that_vary_more_than_the_others_are_not_told_apart(measured):
    def launch(run):
        noise = 0.04 * (-1) ** run.repeat if run.strategy == "distributed" else 0
        return made(run, speed(run, {"distributed": 1.06}) * (1 + noise))

    found = measured(launch)
    one, other = row_of(found, "distributed"), row_of(found, "apex_distributed")
    assert one.speed > 1.05 * other.speed and not found.differ(one, other)


def test_one_repeat_has_no_spread_and_no_verdict(measured, args):
    def launch(run):
        if run.repeat == 2:
            raise timings.Failed("broke", unavailable=False)
        return made(run, speed(run))

    found = measured(launch)
    row = row_of(found, "distributed")
    assert row.spread is None and found.verdict(row) == "undecided"
    assert "no two were compared twice" in report.notes(found)
    assert not any(found.differ(row, other) for other in found.of("data", 2))
    assert "1 times in turns" in report.hardware(found)


def test_noise_makes_a_verdict_undecided(measured):
    factors = [0.8, 1.2]

    def launch(run):
        return made(run, SPEEDS[run.cell[:3]] * factors[run.repeat % 2], wait=0.13)

    found = measured(launch)
    assert found.verdict(row_of(found, "distributed")) == "undecided"
    assert "| (13%) |" in report.main_table(found, "fp32")


def test_a_share_beyond_the_noise_is_in_no_brackets(measured):
    found = measured(lambda run: made(run, speed(run), wait=0.13))
    assert re.search(r"\| 13% +\| 5% ", report.main_table(found, "fp32"))


def test_a_percentile_needs_ten_laps(measured, args):
    found = measured(lambda run: made(run, speed(run)))
    assert "p90" not in report.main_table(found, "fp32")
    for row in found.rows.values():
        for run in row.runs:
            run["timed_steps"] = 20
    assert re.search(r"\| p90 +\|", report.main_table(found, "fp32"))


def test_how_busy_gpus_were_is_a_column_where_it_was_measured(measured):
    found = measured(lambda run: made(run, speed(run)))
    assert "GPU in use" not in report.main_table(found, "fp32")
    for run in row_of(found, "distributed").runs:
        run["gpu_utilisation"] = 93.4
    assert re.search(r"\| GPU in use \|", report.main_table(found, "fp32"))
    assert re.search(r"distributed .*\| 93% ", report.main_table(found, "fp32"))


def test_an_interrupted_folder_can_be_reported(measured, args):
    measured(lambda run: made(run, speed(run)))
    (args.output / "problems.json").unlink()
    assert "| distributed " in report.markdown(report.Timings(args.output))


def test_a_loss_unlike_the_others_is_named(measured):
    def launch(run):
        wrong = run.strategy == "distributed" and run.cell.mode == "data"
        return made(run, speed(run), loss=1.0 if wrong else 7.0)

    text = report.strange_losses(measured(launch))
    assert "distributed, data, 2 x 4: later loss 1.000, 7.000 in the others" in text
    assert "Losses that differ" in text


def test_a_loss_that_is_no_number_is_named(measured):
    def launch(run):
        wrong = run.strategy == "distributed"
        return made(run, speed(run), loss=math.nan if wrong else 7.0)

    assert "distributed, data, 2 x 4: later loss nan" in report.strange_losses(
        measured(launch)
    )


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(UserError, match="no runs of scripts/timings.sh in"):
        report.Timings(tmp_path)


# --- what is in the repository ---


def test_the_report_is_made_of_its_runs(tmp_path):
    found = report.Timings(RESULTS)
    assert (RESULTS / "report.md").read_text() == report.markdown(found)
    assert (RESULTS / "table.md").read_text() == report.readme_table(found)
    assert (RESULTS / "words.md").read_text() == report.readme_words(found)
    done = {run["strategy"] for run in found.runs}
    assert len(done) >= 4 and set(LAUNCHERS) - done <= {
        kind.split()[0] for kind in found.problems
    }
    for run in found.runs:
        assert run["run"]["argv"] and "dirty" not in run["run"]["commit"]
        assert run["run"]["commit"] == found.settings["commit"]
        assert run["timed_steps"] > 0 and run["warmup_steps"] > 0


def test_the_figure_is_drawn_of_its_runs(tmp_path):
    pytest.importorskip("matplotlib")
    report.draw(report.Timings(RESULTS), tmp_path)
    svg = (tmp_path / "timings.svg").read_text()
    assert svg == (RESULTS / "timings.svg").read_text()
    words = [
        "".join(element.itertext()).strip()
        for element in ElementTree.fromstring(svg).iter()
        if element.tag.endswith("text")
    ]
    found = report.Timings(RESULTS)
    assert len(found.of("data", found.largest)) >= 4
    for row in found.of("data", found.largest):
        assert row.strategy in words
    assert "prefers-color-scheme: dark" in svg
    drawing = svg.split("</style>")[1]
    assert not any(light in drawing for light, _ in report.THEMES.values())
