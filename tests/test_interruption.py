"""Stopped, killed or hanging, a run ends, leaves no process behind, and resumes to the bit."""

import contextlib
import json
import os
import random
import shutil
import signal
import time
from functools import partial
from itertools import cycle

import pytest
import torch
from conftest import TINY, Running, wait_until
from ranks import (
    Ranks,
    run_ranks,
    train,
    train_disturbed,
    train_noting,
    watched,
    weights_after,
)
from test_loopback import assert_loopback
from torch.utils._pytree import tree_leaves

# How a run is launched: script of scripts/, its settings, and what that needs
WAYS = {
    "dataparallel": ("dataparallel", {}, None),
    "torchrun": ("distributed", {}, None),
    "mp.spawn": ("multiprocessing_distributed", {}, None),
    "horovodrun": ("horovod_distributed", {"CONTROLLER": "gloo"}, "horovod"),
    "launch": ("distributed", {"LAUNCHER": "launch"}, None),
    "mpirun": ("horovod_distributed", {"CONTROLLER": "mpi"}, "mpi"),
}
LONG = ("launch", "mpirun")  # with --full only


def cases(events_of):
    """Parameters (way, events_of(way)) for each way."""
    found = []
    for way, (_, _, needed) in WAYS.items():
        marks = [getattr(pytest.mark, needed)] if needed else []
        marks += [pytest.mark.full] if way in LONG else []
        found.append(pytest.param(way, events_of(way), marks=marks, id=way))
    return found


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
    "SIGTERM to the launcher's group": lambda job: os.killpg(job.process.pid, 15),
    "SIGUSR1 to the launcher": to_launcher(signal.SIGUSR1),
    "SIGKILL to the launcher": to_launcher(signal.SIGKILL),
    "SIGTERM to one process": to_one_process(signal.SIGTERM),
    "SIGKILL to one process": to_one_process(signal.SIGKILL),
    "SIGKILL to a loader process": to_loader(signal.SIGKILL),
    "one process hangs": to_one_process(signal.SIGSTOP),
}
# What saves before it ends
STOPS = [one for one in EVENTS if "SIGKILL" not in one and "hangs" not in one]


def events_of(way):
    """All; the process of dataparallel is the launcher."""
    alone = way == "dataparallel"
    return [one for one in EVENTS if not (alone and "one process" in one)]


@pytest.mark.full
@pytest.mark.parametrize("way, events", cases(events_of))
def test_a_run_ends_and_leaves_nothing_behind(
    way, events, pictures, tmp_path, record_property
):
    strategy, variables, _ = WAYS[way]
    flags = (*TINY, "--epochs", "500", "--timeout-seconds", "5")
    for number, event in enumerate(events):
        output = tmp_path / str(number)
        with Running(strategy, pictures, output, *flags, **variables) as job:
            job.wait_for_a_save()
            EVENTS[event](job)
            record_property(f"end / {event} / {way}", end(event, way, job))
        assert position(output) < [500, 0]


def end(event, way, job):
    """Wait for the end of a run that something happened to, and look at how it ends."""
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
        assert " lost another process: " in text or "finished no batch for" in text
    return [status, f"{seconds:.1f} s", *["saved"] * saved]


# --- to the bit ---

EPOCHS, STEPS = 6, 12
COURSE = "--arch mobilenet_v3_small --image-size 32 -b 8 --precision fp32 --lr 0.4 "
COURSE += f"--min-crop 0.5 --warmup-epochs 1 --epochs {EPOCHS} --max-steps {STEPS} "
COURSE += "--print-interval 2 --checkpoint-steps 5 --timeout-seconds 5"
COURSE = COURSE.split()
MEASURED = ("loss", "top1", "top5", "images", "epoch", "learning_rate")


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
    """What runs of one and of two processes come to that nothing disturbs."""
    found = {}
    for name, processes in (("dataparallel", 1), ("distributed", 2)):
        folder = tmp_path_factory.mktemp("whole")
        flags = ["--data", small_digits, *COURSE, "-j", 2, "--output", folder / "out"]
        run_ranks(folder, processes, train, name=name, flags=flags)
        found[processes] = came_to(folder / "out")
    return found


def came_to(output):
    """All that a run leaves, but times and speeds."""
    names = ("checkpoint.pt", "best.pt")
    found = [torch.load(output / name, weights_only=True) for name in names]
    lines = (output / "epochs.jsonl").read_text().splitlines()
    for records in (*(one.pop("records") for one in found), map(json.loads, lines)):
        items = [item for record in records for item in record.items()]
        found += [item for item in items if item[0].endswith(MEASURED)]
    leaves = tree_leaves(found)
    return [leaf.tolist() if torch.is_tensor(leaf) else leaf for leaf in leaves]


def position(output):
    """Epoch and step that a checkpoint continues from."""
    content = torch.load(output / "checkpoint.pt", weights_only=True)
    return [content["epoch"], content["step"]]


@pytest.fixture(scope="module")
def hanging(small_digits, tmp_path_factory, request):
    """A run of each way in which a process hangs; launchers wait up to 30 s then.

    With pytest-xdist, --dist loadfile has one process run all tests that use it.
    """
    users = [item for item in request.session.items if "hanging" in item.fixturenames]
    chosen = [one for one in users if not one.get_closest_marker("skip")]
    jobs = {}
    with contextlib.ExitStack() as stack:
        for way in (item.callspec.params["way"] for item in chosen):
            strategy, variables, _ = WAYS[way]
            output = tmp_path_factory.mktemp("hangs") / "out"
            job = Running(strategy, small_digits, output, *COURSE, **variables)
            jobs[way] = stack.enter_context(job)
        run = set(jobs)
        while run:
            wait_until(lambda: any(jobs[way].has_saved() for way in run), 120, "a save")
            way = next(way for way in run if jobs[way].has_saved())
            run.remove(way)
            assert_loopback(jobs[way], way)
            whom = to_loader if way == "dataparallel" else to_one_process
            whom(signal.SIGSTOP)(jobs[way])
        yield jobs


# After a hang; under torchrun test_start.py kills a process
CHAINS = {
    "dataparallel": ("SIGKILL to the launcher", "SIGTERM to the launcher's group"),
    "torchrun": ("SIGTERM to the launcher",),
    "mp.spawn": ("SIGKILL to one process", "SIGTERM to the launcher"),
    "horovodrun": ("SIGKILL to one process", "SIGTERM to one process"),
    "launch": ("SIGKILL to one process", "SIGTERM to one process"),
    "mpirun": ("SIGKILL to one process", "SIGTERM to the launcher"),
}


# A way whose launcher waits longer comes later
@pytest.mark.parametrize(
    "way, events", sorted(cases(CHAINS.get), key=lambda case: case.id)
)
def test_killed_stopped_or_hanging_it_ends_with_the_same_bits(
    way, events, hanging, small_digits, uninterrupted, tmp_path
):
    """Each launcher's, as those of processes without one.

    What is left of Horovod's run is trained by another strategy.
    """
    job, (strategy, variables, _) = hanging[way], WAYS[way]
    end("one process hangs", way, job)
    output = job.output
    positions, flags = [position(output)], [*COURSE, "--resume", "auto"]
    flags += ["-j", 2 if way == "dataparallel" else 0]  # none to start: it is faster
    for event in events:
        with Running(strategy, small_digits, output, *flags, **variables) as job:
            job.wait_for_a_save()
            EVENTS[event](job)
            end(event, way, job)
            assert "resumed in epoch" in job.text()
        positions.append(position(output))
    assert positions == sorted(positions) and positions[-1] < [EPOCHS, 0]
    if way == "horovodrun":
        how = {"name": "multiprocessing_distributed"}
        how["flags"] = ["--data", small_digits, *flags, "--output", output]
        run_ranks(tmp_path, 2, train, **how)
    else:
        with Running(strategy, small_digits, output, *flags, **variables) as job:
            assert job.end(120) == 0, job.text()
    processes = json.loads((output / "report.json").read_text())["world_size"]
    assert processes == (1 if way == "dataparallel" else 2)
    assert came_to(output) == uninterrupted[processes]


@pytest.mark.parametrize(
    "seeds", [[4], pytest.param(range(25), marks=pytest.mark.full)], ids=len
)
def test_killed_again_and_again_it_ends_with_the_same_bits(
    seeds, small_digits, uninterrupted, tmp_path, record_property
):
    """SIGKILL at random moments, from the first step to the last write.

    Each run is of another strategy than the one before, so each resumes the other's.
    """
    kills = 0
    for seed in seeds:
        output = tmp_path / str(seed)
        flags = ["--data", small_digits, *COURSE, "-j", 2, "--output", output]
        flags += ["--resume", "auto"]
        how = {"task": train, "flags": flags}
        kills += kill_until_it_ends(output, random.Random(seed), [2], **how)
        assert came_to(output) == uninterrupted[2]
    assert kills
    record_property("kills / a training, at random moments / runs", len(seeds))
    record_property("kills / a training, at random moments / kills", kills)


def kill_until_it_ends(output, draw, sizes, notes=None, **how):
    """Start a training again and again, and kill it at random; how often it was killed.

    Each run has another number of processes, if there are several `sizes`.
    """
    size, strategies = None, cycle(("distributed", "multiprocessing_distributed"))
    for kills, name in zip(range(30), strategies, strict=False):
        size = draw.choice([one for one in sizes if one != size or len(sizes) == 1])
        if notes:
            (notes / str(kills)).mkdir(parents=True)
            how["notes"] = str(notes / str(kills))
        with Ranks(output.parent, size, name=name, **how) as ranks:
            for _ in range(draw.randrange(1, 10)):  # of 18 in the whole run
                wait_for_a_save(output, ranks)
            time.sleep(draw.uniform(0, 0.3))
            if not ranks.alive():
                assert not any(ranks.end()), ranks.text()
                return kills
    raise AssertionError("it does not end")


@pytest.mark.parametrize(
    "seeds", [[1], pytest.param(range(50), marks=pytest.mark.full)], ids=len
)
def test_with_other_numbers_of_processes_no_image_is_lost_or_repeated(
    seeds, small_digits, tmp_path, record_property
):
    """Every kill changes the number; each image has a class, so its label tells it."""
    course = [*COURSE, "-j", 0, "--resume", "auto"]
    files = sorted((small_digits / "train").glob("*/*"))[: 8 * STEPS]
    for number, file in enumerate(files):
        for part in ("train", "val"):
            folder = tmp_path / "data" / part / f"{number:03d}"
            folder.mkdir(parents=True)
            shutil.copy(file, folder)
    images, kills = set(range(8 * STEPS)), 0
    for seed in seeds:
        output, notes = tmp_path / str(seed), tmp_path / f"notes {seed}"
        flags = ["--data", tmp_path / "data", *course, "--output", output]
        how = {"task": train_noting, "notes": notes, "flags": flags}
        how |= {"net": "small"}
        kills += kill_until_it_ends(output, random.Random(seed), [1, 2, 4], **how)
        trained = {}  # by step, the images that each run gave it
        for run in notes.iterdir():
            batches = {}
            for file in run.iterdir():
                for step, labels in map(json.loads, file.open()):
                    batches.setdefault(step, []).extend(labels)
            for step, batch in batches.items():
                assert len(batch) == 8 or step == max(batches)  # where it was killed
                if len(batch) == 8:
                    trained.setdefault(step, set()).add(frozenset(batch))
        assert sorted(trained) == [*range(EPOCHS * STEPS)]
        for first in range(0, EPOCHS * STEPS, STEPS):
            batches = [trained[step] for step in range(first, first + STEPS)]
            assert all(len(runs) == 1 for runs in batches)
            assert images == {one for (batch,) in batches for one in batch}
    assert kills
    record_property(
        "kills / another number of processes, at random moments / runs", len(seeds)
    )
    record_property(
        "kills / another number of processes, at random moments / kills", kills
    )


def wait_for_a_save(output, ranks):
    """Or for the end."""

    def saved():
        path = output / "checkpoint.pt"
        return path.exists() and path.stat().st_mtime_ns

    before = saved()
    ended = partial(lambda before: saved() != before or not ranks.alive(), before)
    wait_until(ended, 60, "a save", interval=0.005)


def test_the_same_numbers_of_processes_at_the_same_images_give_the_same_bits(
    digits, tmp_path
):
    """Whatever else kills the run in between."""
    course = "--image-size 32 -b 48 --precision fp32 --lr 0.1 -j 0 --resume auto "
    course += "--max-steps 10 --epochs 3 --print-interval 1 --checkpoint-steps 4"
    once = [(2, 16, "SIGTERM"), (1, 24, "SIGTERM"), (2, 0, "")]
    killed = [once[0], (1, 23, "SIGKILL"), *once[1:]]
    saved = []
    for name, parts in (("once", once), ("killed", killed)):
        flags = ["--data", digits, *course.split(), "--output", tmp_path / name]
        how = {"name": "distributed", "net": "small", "flags": flags}
        for processes, at, what in parts:
            with Ranks(
                tmp_path, processes, train_disturbed, at=at, what=what, **how
            ) as ranks:
                ended = ranks.end()
                assert any(ended) == bool(what), ranks.text()
        saved.append(torch.load(tmp_path / name / "checkpoint.pt"))
    one, two = ([x for x in tree_leaves(one) if torch.is_tensor(x)] for one in saved)
    assert len(one) > 10
    assert all(map(torch.equal, one, two))
    assert saved[0]["epoch"] == saved[1]["epoch"] == 3


def test_with_three_processes_a_resumed_step_of_ddp_adds_in_another_order(tmp_path):
    """DDP rearranges its buckets after its first step, unless it looks for unused
    parameters. Where an element is in its bucket decides the order of the additions."""
    found = {}
    for name, processes, parts, options in (
        ("whole", 3, [12], {}),
        ("whole again", 3, [12], {}),
        ("resumed", 3, [6, 6], {}),
        ("two, whole", 2, [12], {}),
        ("two, resumed", 2, [6, 6], {}),
        ("fixed, whole", 3, [12], {"find_unused_parameters": True}),
        ("fixed, resumed", 3, [6, 6], {"find_unused_parameters": True}),
    ):
        how = {"parts": parts, **options}
        found[name] = run_ranks(tmp_path / name, processes, weights_after, **how)[0]

    def alike(one, other):
        return all(map(torch.equal, found[one], found[other]))

    assert alike("whole", "whole again")
    assert not alike("whole", "resumed")
    torch.testing.assert_close(found["whole"], found["resumed"], rtol=0, atol=1e-6)
    assert alike("two, whole", "two, resumed")
    assert alike("fixed, whole", "fixed, resumed")


# --- all processes agree ---


def test_a_signal_stops_all_where_the_sums_are_combined_next(small_digits, tmp_path):
    """In step 3, with a print interval of 2: after step 4, not at the epoch's end."""
    flags = ["--data", small_digits, *COURSE, "-j", 0, "--output", tmp_path / "out"]
    flags += ["-b", 12, "--max-steps", 8, "--print-interval", 2]
    how = {"name": "distributed", "flags": flags, "net": "small", "at": 3}
    with Ranks(tmp_path, 2, train_disturbed, what="SIGUSR1", **how) as ranks:
        assert ranks.end() == [143] * 2, ranks.text()
        assert ranks.text().count("stopped after step 4 of epoch 1 and saved") == 1
        assert "Traceback" not in ranks.text()
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
    assert position(tmp_path / "out") == [1, 6]


# --- the watchdog ---


def test_the_watchdog_ends_a_process_that_waits_without_end(tmp_path):
    """In C code, as after a rank died under NCCL: no handler of Python runs any more."""
    with Ranks(tmp_path, 1, watched, how="waits", limit=1) as ranks:
        wait_until(lambda: "begins" in ranks.text(), 20, "a start")
        ranks.signal(0, signal.SIGTERM)  # only asks it to stop
        assert ranks.end(10) == [1]
        assert "process 0 on " in ranks.text()
        assert "finished no batch for 2 s" in ranks.text()


def test_the_watchdog_spares_a_process_that_was_suspended(tmp_path):
    with Ranks(tmp_path, 1, watched, how="trains", limit=1) as ranks:
        wait_until(lambda: "begins" in ranks.text(), 20, "a start")
        ranks.signal(0, signal.SIGSTOP)
        time.sleep(3)
        ranks.signal(0, signal.SIGCONT)
        assert ranks.end(10) == [0], ranks.text()
