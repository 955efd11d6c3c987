"""Stopped, killed or hanging, a run ends, leaves no process behind, and resumes to the bit."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time

import pytest
import torch
from conftest import MISSING, TINY, Running, launcher, wait_until
from ranks import Ranks, run_ranks, train, train_disturbed, watched
from test_loopback import assert_loopback

# How a run is launched: script of scripts/ and its settings
WAYS = {
    "dataparallel": ("dataparallel", {}),
    "torchrun": ("distributed", {}),
    "launch": ("distributed", {"LAUNCHER": "launch"}),
    "mp.spawn": ("multiprocessing_distributed", {}),
    "horovodrun": ("horovod_distributed", {"CONTROLLER": "gloo"}),
    "mpirun": ("horovod_distributed", {"CONTROLLER": "mpi"}),
}
LAUNCHERS = ("torchrun", "mp.spawn", "horovodrun", "mpirun")
NEEDS = {"horovodrun": pytest.mark.horovod, "mpirun": pytest.mark.mpi}

# --- what ends a run ---


def to_launcher(number):
    return lambda job: os.kill(job.process.pid, number)


def to_one_process(number):
    return lambda job: os.kill(max(job.trainers()), number)


def to_loader(number):
    return lambda job: os.kill(max(job.loaders()), number)


EVENTS = {
    "Ctrl-C": lambda job: os.killpg(job.process.pid, signal.SIGINT),
    "SIGTERM to the launcher": to_launcher(signal.SIGTERM),
    "SIGUSR1 to the launcher": to_launcher(signal.SIGUSR1),
    "SIGKILL to the launcher": to_launcher(signal.SIGKILL),
    "SIGTERM to one process": to_one_process(signal.SIGTERM),
    "SIGUSR1 to one process": to_one_process(signal.SIGUSR1),
    "SIGKILL to one process": to_one_process(signal.SIGKILL),
    "SIGKILL to a loader process": to_loader(signal.SIGKILL),
    "one process hangs": to_one_process(signal.SIGSTOP),
}
# What saves before it ends
STOPS = {"Ctrl-C", "SIGTERM to the launcher", "SIGUSR1 to the launcher"}
STOPS |= {"SIGTERM to one process", "SIGUSR1 to one process"}
SHORT = {
    ("dataparallel", "Ctrl-C"),
    ("dataparallel", "SIGKILL to a loader process"),
    ("torchrun", "SIGKILL to the launcher"),
}


def cases():
    for way in WAYS:
        for event in EVENTS:
            if way == "dataparallel" and "one process" in event:
                continue  # the process is the launcher
            marks = [NEEDS[way]] if way in NEEDS else []
            if (way, event) not in SHORT:
                marks.append(pytest.mark.full)
            yield pytest.param(way, event, marks=marks)


@pytest.mark.parametrize("way, event", list(cases()))
def test_a_run_ends_and_leaves_nothing_behind(way, event, pictures, tmp_path, figure):
    """And listens, while it runs, on loopback only."""
    strategy, variables = WAYS[way]
    flags = (*TINY, "--epochs", "500", "--timeout-seconds", "5")
    with Running(strategy, pictures, tmp_path / "out", *flags, **variables) as job:
        if way != "dataparallel":
            wait_until(lambda: len(job.trainers()) == 2, 20, "two training processes")
        assert_loopback(job, way)
        figure(f"end / {event} / {way}", end_by(event, way, job))
    content = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert content["epoch"] < 500


def end_by(event, way, job):
    """End a run by an event, and look at how it ends."""
    EVENTS[event](job)
    return ended_by(event, way, job)


def ended_by(event, way, job):
    began = time.monotonic()
    status = job.end(90)
    seconds, text = time.monotonic() - began, job.text()
    saved = "stopped after step" in text or "stopped after epoch" in text
    assert status != 0, text
    assert text.count("stopped after") <= 1
    # Where the launcher is killed its processes are asked to stop; one alone is just dead
    launcher_died = event == "SIGKILL to the launcher" and way != "dataparallel"
    assert saved == (event in STOPS or launcher_died), text
    torchrun = way in ("torchrun", "launch")
    if event in STOPS and way in ("dataparallel", "mp.spawn"):
        assert status == 143
    if torchrun and "launcher" not in event and event != "Ctrl-C":
        assert status == (143 if event in STOPS else 1)
    if event in STOPS and "launcher" not in event:
        assert "leaked" not in text
    if "Traceback" in text:  # the launcher's own
        assert way == "horovodrun", text[-3000:]
    if torchrun or way == "mp.spawn" and "hangs" not in event:
        assert ("SIGKILL" in text) == (event == "SIGKILL to one process"), text
    if event not in STOPS and way != "mpirun" and "launcher" not in event:
        assert " lost another: " in text or "finished no batch for" in text
    return [status, f"{seconds:.1f} s", *["saved"] * saved]


def test_a_process_that_hangs_ends_its_job(pictures, tmp_path):
    """Launchers wait up to 30 s before they kill it, here all at the same time."""
    event, jobs = "one process hangs", {}
    flags = (*TINY, "--epochs", "5000", "--timeout-seconds", "10")
    with contextlib.ExitStack() as stack:
        for way in LAUNCHERS:
            if way not in NEEDS or MISSING[NEEDS[way].name] is None:
                where = pictures, tmp_path / f"{way}-out"
                job = Running(WAYS[way][0], *where, *flags, **WAYS[way][1])
                jobs[way] = stack.enter_context(job)
                assert_loopback(job, way)
                EVENTS[event](job)
        for way, job in jobs.items():
            ended_by(event, way, job)


# --- to the bit ---

EPOCHS, STEPS = 8, 12
COURSE = "--arch mobilenet_v3_small --image-size 32 -b 8 --precision fp32 --lr 0.4 "
COURSE += f"--min-crop 0.5 --warmup-epochs 1 --epochs {EPOCHS} --max-steps {STEPS} "
COURSE = (COURSE + "--print-interval 2 --checkpoint-steps 5").split()
TIMES = {
    *("first_step", "seconds", "warmup_steps"),
    *("images_per_second", "step_milliseconds", "step_milliseconds_p90"),
    *("data_wait_share", "peak_memory_mib"),
}


@pytest.fixture(scope="module")
def small_digits(digits, tmp_path_factory):
    """96 training and 30 validation images."""
    folder = tmp_path_factory.mktemp("data") / "small"
    for part, count in (("train", 10), ("val", 3)):
        for source in sorted((digits / part).iterdir()):
            (folder / part / source.name).mkdir(parents=True)
            for file in sorted(source.iterdir())[:count]:
                shutil.copy(file, folder / part / source.name)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(small_digits, tmp_path_factory):
    """The output of a run that nothing disturbed; strategies have the same bits."""
    folder = tmp_path_factory.mktemp("whole")
    flags = ["--data", small_digits, *COURSE, "-j", 2, "--output", folder / "out"]
    run_ranks(folder, 2, train, name="distributed", flags=flags)
    return folder / "out"


def assert_same_run(output, expected):
    """Both files of weights, the optimizer, the schedule and the figures, to the bit."""
    for name in ("checkpoint.pt", "best.pt"):
        one, other = (
            torch.load(folder / name, weights_only=True)
            for folder in (output, expected)
        )
        for key, tensor in one["state_dict"].items():
            assert torch.equal(tensor, other["state_dict"][key]), key
        states = one["optimizer"]["state"]
        assert states and states.keys() == other["optimizer"]["state"].keys()
        for number, state in states.items():
            other_state = other["optimizer"]["state"][number]
            assert torch.equal(state["momentum_buffer"], other_state["momentum_buffer"])
        for key in ("epoch", "step", "best_acc1", "scheduler", "scaler", "sums"):
            assert one[key] == other[key], key
        assert one["optimizer"]["param_groups"] == other["optimizer"]["param_groups"]
        assert figures_of(one["records"]) == figures_of(other["records"])
    figures, others = (
        figures_of(map(json.loads, (folder / "epochs.jsonl").read_text().splitlines()))
        for folder in (output, expected)
    )
    assert figures == others and len(figures) == EPOCHS


def position(output):
    """Epoch and step that a checkpoint goes on from."""
    content = torch.load(output / "checkpoint.pt", weights_only=True)
    return [content["epoch"], content["step"]]


def wait_for_epochs(output, epochs):
    lines = output / "epochs.jsonl"
    wait_until(
        lambda: lines.exists() and len(lines.read_text().splitlines()) >= epochs,
        60,
        f"{epochs} epochs",
    )


def wait_for_a_save(output, ranks):
    """Or for the end."""
    path = output / "checkpoint.pt"

    def saved():
        return path.stat().st_mtime_ns if path.exists() else 0

    before = saved()
    wait_until(
        lambda: saved() > before or not ranks.alive(), 60, "a save", interval=0.005
    )


def figures_of(records):
    return [
        {name: value for name, value in record.items() if name not in TIMES}
        for record in records
    ]


@pytest.mark.parametrize(
    "way, end",
    [
        pytest.param("launch", "SIGTERM to one process", marks=pytest.mark.full),
        ("torchrun", "SIGTERM to one process"),
        ("mp.spawn", "SIGTERM to the launcher"),
        pytest.param("horovodrun", "SIGTERM to one process", marks=pytest.mark.horovod),
        pytest.param("mpirun", "SIGTERM to the launcher", marks=pytest.mark.mpi),
    ],
)
def test_killed_and_stopped_it_ends_with_the_same_bits(
    way, end, small_digits, uninterrupted, tmp_path, figure
):
    """What is left is trained by another strategy."""
    strategy, variables = WAYS[way]
    moments, positions = random.Random(way), []
    output, flags = tmp_path / "out", [*COURSE]
    for event in ("SIGKILL to one process", end):
        with Running(strategy, small_digits, output, *flags, **variables) as job:
            if positions:
                wait_until(lambda job=job: "resumed at" in job.text(), 90, "a resume")
                wait_for_epochs(output, positions[-1][0] + 1)
            time.sleep(moments.uniform(0, 0.3))
            figure(f"end / {event} / {way}", end_by(event, way, job))
        positions.append(position(output))
        assert positions[-1][0] < EPOCHS, f"{event} came too late to show anything"
        flags = [*COURSE, "--resume", "auto"]
    assert positions == sorted(positions)
    flags = ["--data", small_digits, *flags, "-j", 2, "--output", output]
    name = "multiprocessing_distributed"
    run_ranks(tmp_path / "last", 2, train, name=name, flags=flags)
    assert_same_run(output, uninterrupted)
    figure(f"resumed to the bit / {way}", positions)


@pytest.mark.parametrize(
    "seed",
    [*range(2), *(pytest.param(n, marks=pytest.mark.full) for n in range(2, 25))],
)
def test_killed_again_and_again_it_ends_with_the_same_bits(
    seed, small_digits, uninterrupted, tmp_path, figure
):
    """SIGKILL at random moments, from the first step to the last write."""
    moments = random.Random(seed)
    name = ("distributed", "multiprocessing_distributed")[seed % 2]
    output = tmp_path / "out"
    flags = ["--data", small_digits, *COURSE, "-j", 2, "--output", output]
    flags += ["--resume", "auto"]
    kills = []
    for _ in range(40):
        with Ranks(tmp_path, 2, train, name=name, flags=flags) as ranks:
            for _ in range(moments.randrange(20)):  # of 24 in the whole run
                wait_for_a_save(output, ranks)
            time.sleep(moments.uniform(0, 0.3))
            if not ranks.alive():
                assert ranks.end() == [0, 0], ranks.text()
                break
        with contextlib.suppress(FileNotFoundError):
            kills.append(position(output))
    else:
        pytest.fail(f"not finished after 40 runs: {kills}")
    assert_same_run(output, uninterrupted)
    figure(f"killed again and again / {name} / {seed}", kills)


def without_norm(digits, folder, processes, *flags):
    """Processes that train a network without batch norm for four epochs."""
    course = "--image-size 32 -b 48 --precision fp32 --lr 0.1 --warmup-epochs 1 -j 0 "
    course += "--max-steps 10 --epochs 4 --print-interval 1 --checkpoint-steps 4"
    flags = ["--data", digits, *course.split(), "--output", folder / "out", *flags]
    return Ranks(folder, processes, train, name="distributed", flags=flags, net="small")


@pytest.fixture(scope="module")
def whole_and_stopped(digits, tmp_path_factory):
    """The outputs of two processes that trained to the end, and of two that did not."""
    whole, stopped = (tmp_path_factory.mktemp(name) for name in ("whole", "stopped"))
    with without_norm(digits, whole, 2) as ranks:
        assert ranks.end() == [0, 0]
    with without_norm(digits, stopped, 2) as ranks:
        wait_until((stopped / "out" / "checkpoint.pt").exists, 60, "first checkpoint")
        ranks.signal(1, signal.SIGTERM)
        assert ranks.end() == [143, 143], ranks.text()
    return whole / "out", stopped / "out"


@pytest.mark.parametrize("world_size", (1, 3))
def test_another_number_of_processes_continues_at_the_same_image(
    world_size, whole_and_stopped, digits, tmp_path
):
    """The network has no batch norm, so what is left is rounding (see test_equality)."""
    whole, stopped = whole_and_stopped
    epoch, step = position(stopped)
    assert epoch < 4
    shutil.copytree(stopped, tmp_path / "out")
    with without_norm(digits, tmp_path, world_size, "--resume", "auto") as ranks:
        assert ranks.end() == [0] * world_size, ranks.text()
        assert f"(image {48 * step} of its order)" in ranks.text()
    one, other = (
        torch.load(output / "checkpoint.pt", weights_only=True)
        for output in (tmp_path / "out", whole)
    )
    for key, tensor in one["state_dict"].items():
        torch.testing.assert_close(tensor, other["state_dict"][key], rtol=0, atol=4e-6)
    for record, expected in zip(one["records"], other["records"], strict=True):
        assert record["images"] == expected["images"] == 480
        assert record["train_loss"] == pytest.approx(expected["train_loss"], abs=1e-5)


# --- all processes agree ---


@pytest.mark.parametrize(
    "number, rank", [("SIGTERM", 0), ("SIGUSR1", 2), ("SIGINT", 0)]
)
def test_a_signal_to_any_process_stops_all_after_the_same_step(
    number, rank, small_digits, tmp_path
):
    flags = ["--data", small_digits, *COURSE, "-j", 2, "--output", tmp_path / "out"]
    flags += ["-b", 12, "--max-steps", 8]
    name = "multiprocessing_distributed" if rank else "distributed"
    with Ranks(tmp_path, 3, train, name=name, flags=flags) as ranks:
        wait_until((tmp_path / "out" / "checkpoint.pt").exists, 60, "first checkpoint")
        ranks.signal(rank, getattr(signal, number))
        assert ranks.end() == [143] * 3, ranks.text()
        assert ranks.text().count("stopped after") == 1
        assert "Traceback" not in ranks.text()


def test_a_signal_stops_all_where_the_sums_are_combined_next(small_digits, tmp_path):
    """In step 3, with a print interval of 2: after step 4, not at the epoch's end."""
    flags = ["--data", small_digits, *COURSE, "-j", 0, "--output", tmp_path / "out"]
    flags += ["-b", 12, "--max-steps", 8, "--print-interval", 2]
    how = {"name": "distributed", "flags": flags, "net": "small", "at": 3}
    with Ranks(tmp_path, 2, train_disturbed, what="SIGTERM", **how) as ranks:
        assert ranks.end() == [143] * 2, ranks.text()
        assert "stopped after step 4 of epoch 1, which is saved" in ranks.text()
    content = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert (content["epoch"], content["step"], content["sums"]["images"]) == (0, 4, 48)


def test_a_loss_that_is_not_finite_stops_all_and_spares_the_checkpoint(
    small_digits, tmp_path
):
    """On one process only, in the middle of the second epoch."""
    flags = ["--data", small_digits, *COURSE, "-j", 0, "--output", tmp_path / "out"]
    flags = [*flags, "--checkpoint-steps", 1]
    how = {"name": "distributed", "flags": flags, "at": STEPS + 7}
    with Ranks(tmp_path, 2, train_disturbed, what="nan", **how) as ranks:
        assert ranks.end() == [2, 2], ranks.text()
        text = ranks.text()
    assert text.count("loss became nan by step 7 of epoch 2 at learning rate 0.0") == 1
    content = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert (content["epoch"], content["step"]) == (1, 6)
    assert all(tensor.isfinite().all() for tensor in content["state_dict"].values())


# --- hangs ---


def test_a_process_that_hangs_ends_the_others(small_digits, tmp_path):
    flags = ["--data", small_digits, *COURSE, "-j", 0, "--output", tmp_path / "out"]
    flags += ["-b", 12, "--max-steps", 8, "--timeout-seconds", 3]
    with Ranks(tmp_path, 3, train, name="distributed", flags=flags) as ranks:
        wait_until((tmp_path / "out" / "checkpoint.pt").exists, 60, "first checkpoint")
        ranks.signal(1, signal.SIGSTOP)
        began = time.monotonic()
        wait_until(lambda: not ranks.alive(0, 2), 12, "the others end")
        assert 2 < time.monotonic() - began
        assert [ranks.processes[rank].exitcode for rank in (0, 2)] == [1, 1]
        assert ranks.text().count(" lost another: ") == 2
        assert "Traceback" not in ranks.text()


@pytest.mark.parametrize("how", ("waits", "waits in C"))
def test_the_watchdog_ends_a_process_that_waits_without_end(how, tmp_path):
    with Ranks(tmp_path, 1, watched, how=how, limit=1) as ranks:
        assert ranks.end(10) == [1]
        assert "process 0 on " in ranks.text()
        assert "finished no batch for 2 s" in ranks.text()


def test_a_second_signal_ends_a_process_that_waits_in_c_code(tmp_path):
    """After a rank died under NCCL: the main thread never runs a handler again."""
    with Ranks(tmp_path, 1, watched, how="waits in C") as ranks:
        wait_until(lambda: "begins" in ranks.text(), 20, "a start")
        time.sleep(1.2)  # the watchdog has seen the batch
        for _ in range(3):  # one Ctrl-C, handed on by a launcher
            ranks.signal(0, signal.SIGTERM)
        time.sleep(1)
        assert ranks.alive()
        ranks.signal(0, signal.SIGTERM)
        assert ranks.end(10) == [1]
        assert "finished no batch between two signals" in ranks.text()


def test_a_second_signal_spares_a_process_that_trains(tmp_path):
    """As SIGUSR1 of Slurm some time before its SIGTERM."""
    with Ranks(tmp_path, 1, watched, how="signalled twice") as ranks:
        assert ranks.end(20) == [0], ranks.text()


def test_the_watchdog_spares_a_process_that_was_suspended(tmp_path):
    with Ranks(tmp_path, 1, watched, how="trains", limit=1) as ranks:
        wait_until(lambda: "begins" in ranks.text(), 20, "a start")
        ranks.signal(0, signal.SIGSTOP)
        time.sleep(3)
        ranks.signal(0, signal.SIGCONT)
        assert ranks.end(10) == [0], ranks.text()


# --- a full disk, a read-only one ---


@pytest.fixture
def disk(tmp_path):
    """A disk of 1 MiB in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a disk: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_ends_the_run_and_spares_the_checkpoint(disk, digits, tmp_path):
    flags = "--image-size 32 -b 48 --precision fp32 -j 0 --max-steps 5 --epochs 200"
    flags = ["--data", digits, *flags.split(), "--output", disk / "out"]
    with Ranks(
        tmp_path, 2, train, name="distributed", flags=flags, net="small"
    ) as ranks:
        wait_until((disk / "out" / "checkpoint.pt").exists, 60, "first checkpoint")
        with contextlib.suppress(OSError):
            (disk / "filling").write_bytes(bytes(2**20))
        first, second = ranks.end()
        assert first == 2 and second != 0, ranks.text()
        assert ranks.text().count("No space left on device; what was there is") == 1
        assert "Traceback" not in ranks.text()
    assert not list((disk / "out").glob("*.tmp"))
    for file in (disk / "out").glob("*.pt"):
        content = torch.load(file, weights_only=True)
        assert content["state_dict"] and content["epoch"] < 200
    (disk / "filling").unlink()
    path = disk / "out" / "checkpoint.pt"
    more = torch.load(path, weights_only=True)["epoch"] + 3
    flags = [*flags, "--epochs", more, "--resume", "auto"]
    run_ranks(tmp_path, 2, train, name="distributed", flags=flags, net="small")
    assert torch.load(path, weights_only=True)["epoch"] == more


def test_a_read_only_disk_is_refused_before_the_launch(disk, digits, tmp_path):
    (disk / "out").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    flags = ("--data", digits, *TINY, "--output", disk / "out")
    ended = launcher("distributed", *flags)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"distributed.py: error: --output {disk / 'out'} cannot be written to\n"
    )
