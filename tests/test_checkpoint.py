"""Checkpoints: complete, refused where they do not fit, never half written."""

import contextlib
import errno
import fcntl
import json
import os
import random
import resource
import signal
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import wait_until
from ranks import Ranks, lock_and_fork, parse, save_for_ever

from common.checkpoint import (
    TrainingState,
    find_checkpoint,
    lock_output,
    open_checkpoint,
    read_checkpoint,
    replace_file,
)
from common.data import RandomImages, build_datasets
from common.errors import UserError
from common.schedule import build_scheduler
from launch.check import check

FIGURES = {"seconds": 1.0, "first_step": 0}
IMAGES = RandomImages(50, 8), RandomImages(20, 8)


class Tiny(torch.nn.Linear):
    """A network that could have pretrained weights."""

    __module__ = "torchvision.of.a.test"


def arguments(output, *flags):
    return parse("--data", "x", "--output", output, "--precision", "fp32", *flags)


def make(output, *flags, outputs=3, images=IMAGES):
    """Arguments, and the state of a tiny run."""
    args = arguments(output, *flags)
    torch.manual_seed(args.seed)
    model = Tiny(4, outputs)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scheduler = build_scheduler(args, optimizer, 10)
    return args, TrainingState(args, images, model, optimizer, scheduler, scaler)


def resumed(output, *flags, **how):
    """The state of another process that continues the run."""
    args, state = make(output, "--resume", "auto", *flags, **how)
    state.resume(args, 0, open_checkpoint(args))
    return state


def step(state, number):
    torch.manual_seed(number)
    state.optimizer.zero_grad()
    state.raw_model(torch.randn(2, 4)).square().sum().backward()
    state.learning_rate = state.optimizer.param_groups[0]["lr"]
    state.optimizer.step()
    state.scheduler.step()
    sums = {"loss": 2.0 * number, "top1": 100, "top5": 200, "images": 2, "stop": 0}
    return state.add(number, sums)


def finish(state, top1, loss=0.5, stop=False):
    val = {"loss": loss, "top1": top1, "top5": 99.0, "images": 40, "stop": stop}
    return state.finish_epoch(val, FIGURES)


def train_epochs(state, *top1):
    """One step an epoch, each saved."""
    for accuracy in top1:
        step(state, 1)
        finish(state, accuracy)
        state.save()


def saved(tmp_path, *flags):
    train_epochs(make(tmp_path / "run", *flags)[1], 50.0)
    return tmp_path / "run" / "checkpoint.pt"


def test_best_is_kept_when_the_next_epoch_is_no_better(tmp_path):
    """Also by a resumed run; 200 / 3 is another number in float32."""
    train_epochs(make(tmp_path)[1], 60.0, 200 / 3)
    state = resumed(tmp_path)
    assert state.best == 200 / 3
    train_epochs(state, 200 / 3, 50.0)
    best, last = (read_checkpoint(tmp_path / n) for n in ("best.pt", "checkpoint.pt"))
    assert (best["epoch"], last["epoch"]) == (2, 4)
    assert best["best_acc1"].item() == last["best_acc1"].item()
    lines = (tmp_path / "epochs.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["epoch"] for record in records] == [0, 1, 2, 3]
    assert records == state.records
    assert records[0]["train_loss"] == 1.0 and records[0]["images"] == 2
    assert records[0]["train_top1"] == 50.0 and records[0]["val_images"] == 40


def test_the_first_epoch_in_a_new_folder_is_its_best(tmp_path):
    """Whatever the best was in the folder that it is resumed from."""
    args, state = make(tmp_path / "new", "--resume", str(saved(tmp_path)))
    state.resume(args, 0, open_checkpoint(args))
    for top1, best in ((0.0, 2), (30.0, 3), (20.0, 3)):
        step(state, 1)
        state.save()
        finish(state, top1)
        state.save()
        assert read_checkpoint(tmp_path / "new" / "best.pt")["epoch"] == best


def test_a_checkpoint_replaced_since_the_agreement_is_not_loaded(tmp_path):
    """Processes that load it later would load another one than those before."""
    path = saved(tmp_path)
    args, state = make(tmp_path / "run", "--resume", "auto")
    agreed, weights = open_checkpoint(args), torch.load(path)["state_dict"]
    train_epochs(make(tmp_path / "run")[1], 50.0, 99.0)
    assert read_checkpoint(path)["epoch"] == 2
    state.resume(args, 0, agreed)
    assert state.epoch == 1
    assert all(w.equal(weights[n]) for n, w in state.raw_model.state_dict().items())


# --- two runs in one folder ---


def free(output):
    """Whether a run could begin there."""
    with contextlib.suppress(UserError):
        lock_output(output).close()
        return True


def test_a_run_s_lock_ends_with_it_whatever_it_forked(pictures, tmp_path):
    """A loader process can outlive the run for a moment."""
    output = tmp_path / "out"
    flags = ("--data", str(pictures), "-b", "4", "--device", "cpu", "--image-size=32")
    args, state = make(output, *flags)
    check(args, 1)  # lets go
    with Ranks(tmp_path, 1, lock_and_fork, output=str(output)) as ranks:
        wait_until(lambda: "forked" in ranks.text(), 20, "the lock")
        child = int(ranks.text().split()[-1])
        try:
            with pytest.raises(UserError, match=f"another run is writing to {output}"):
                state.resume(args, 0, open_checkpoint(args))
            state.resume(args, 1, open_checkpoint(args))  # rank 0 has the lock for all
            with pytest.raises(UserError, match="another run"):
                check(args, 1)
            check(args, 1, world_size=2)  # rank 0 may be elsewhere, and of this run
            args.evaluate = True
            check(args, 1)
            state.resume(args, 0, open_checkpoint(args))
            ranks.signal(0, signal.SIGKILL)
            wait_until(lambda: free(output), 10, "the lock's end")
            os.kill(child, 0)  # is still there
        finally:
            os.kill(child, signal.SIGKILL)


# --- what ends a run ---


def test_a_stop_during_validation_is_followed(tmp_path):
    _, state = make(tmp_path)
    for stop in (True, False):
        step(state, 1)
        finish(state, 50.0, stop=stop)
        assert state.stop_requested == stop


def test_numbers_that_are_not_finite_end_the_run(tmp_path):
    before = saved(tmp_path).read_bytes()
    state = resumed(tmp_path / "run")
    step(state, 4)
    with pytest.raises(UserError, match="validation loss became inf by step 4"):
        finish(state, 10.0, loss=float("inf"))
    with pytest.raises(UserError, match="the loss became nan by step 7 of epoch 2"):
        state.add(7, {"loss": float("nan"), "images": 8})
    with torch.no_grad():
        state.raw_model.weight[0, 0] = float("inf")
    with pytest.raises(UserError, match="a weight became infinite or NaN by step 7"):
        state.save()
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == before


# --- refusals ---


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--arch resnet50", "--arch was resnet18 when .* is now resnet50"),
        ("--lr 0.3", "--lr was 0.1 when .* is now 0.3"),
        ("--no-flip", "--no-flip was not given when .* is now given"),
        ("--decoder pil", "--decoder was auto when .* is now pil"),
        pytest.param(
            "--epochs 120 --decoder torchcodec -j 3 --checkpoint-steps 7",
            None,
            marks=pytest.mark.torchcodec,
        ),
        ("--compile --no-channels-last --device cpu --print-interval 3", None),
    ],
)
def test_another_recipe_is_refused(tmp_path, flags, message):
    saved(tmp_path)
    with pytest.raises(UserError, match=message) if message else nullcontext():
        assert resumed(tmp_path / "run", *flags.split()).epoch == 1
    saved(tmp_path / "cosine", "--schedule", "cosine")
    with pytest.raises(UserError, match="--epochs was 90 .* is now 120"):
        resumed(tmp_path / "cosine" / "run", "--schedule=cosine", "--epochs=120")


def test_the_check_before_a_launch_looks_at_all_processes_and_the_checkpoint(
    pictures, tmp_path
):
    flags = ("--data", str(pictures), "-b", "4", "--image-size", "32", "-j", "0")
    flags = (*flags, "--device", "cpu")
    _, state = make(tmp_path, *flags)
    step(state, 1)
    state.save()
    for given, processes, world_size, message in (
        ((), 1, None, None),
        (("--lr", "0.3"), 1, None, "--lr was 0.1 when .* is now 0.3"),
        ((), 2, None, "cannot be divided evenly among 6 processes"),  # on 3 machines
        ((), 2, 8, "cannot be divided evenly among 8 processes"),
        (("--data", str(tmp_path / "none")), 1, None, "cannot open the folder"),
    ):
        args = arguments(tmp_path, *flags, "--resume", "auto", *given)
        args.precision = None  # as without the flag: the device decides
        args.nnodes = 3 if message and " 6 " in message else 1
        with pytest.raises(UserError, match=message) if message else nullcontext():
            check(args, processes, world_size)
    args.backend = "nccl"
    with pytest.raises(UserError, match="--backend nccl"):
        check(args, 1)


def test_weights_of_another_network_are_refused(tmp_path):
    saved(tmp_path)
    for flags in ((), ("--evaluate",)):
        with pytest.raises(UserError, match="does not match this model"):
            resumed(tmp_path / "run", *flags, outputs=5)
        args, state = make(tmp_path / "run", "--resume", "auto", *flags)
        state.raw_model = torch.nn.Sequential(state.raw_model)  # has other names
        with pytest.raises(UserError, match="does not match this model"):
            state.resume(args, 0, open_checkpoint(args))
    # GoogLeNet with pretrained weights scales its input; the saved file cannot tell
    saved(tmp_path / "2", "--pretrained")
    with pytest.raises(UserError, match="--pretrained was given .* now not given"):
        resumed(tmp_path / "2" / "run", "--evaluate")
    resumed(tmp_path / "2" / "run", *("--evaluate", "--pretrained", "--lr", "7"))


def test_other_images_are_refused(pictures, tmp_path):
    """But not where they are only validated, and not in another folder."""

    def images_of(folder):
        return build_datasets(arguments(tmp_path, "--data", str(folder), "-b", "4"))

    output = tmp_path / "run"
    train_epochs(make(output, images=images_of(pictures))[1], 50.0)
    moved = pictures.rename(tmp_path / "elsewhere")
    assert resumed(output, images=images_of(moved)).epoch == 1
    (moved / "val" / "cat" / "3.JPEG").rename(moved / "val" / "cat" / "4.JPEG")
    with pytest.raises(UserError, match=r"\(16 training, 8 validation\) that differ"):
        resumed(output, images=images_of(moved))
    resumed(output, "--evaluate", images=images_of(moved))
    with pytest.raises(UserError, match=r"--data \(50 training"):
        resumed(output)  # of a data set without paths the numbers are compared


def test_a_run_is_never_overwritten(tmp_path):
    path, other = saved(tmp_path), saved(tmp_path / "second")
    evaluate = ("--evaluate", "--pretrained")
    for folder, flags, found in (
        ("run", (), "resume it with --resume auto, or choose another --output"),
        ("run", evaluate, None),
        ("only read", evaluate, None),
        ("new", (), None),
        ("new", ("--resume", "auto"), None),
        ("run", ("--resume", "auto"), path),
        ("run", ("--resume", str(path)), path),
        ("new", ("--resume", "auto", "--evaluate"), "checkpoint.pt does not exist"),
        ("run", ("--resume", str(other)), "holds another run's checkpoint"),
        ("new", ("--resume", str(tmp_path / "no.pt")), "there is no such file"),
    ):
        args = arguments(tmp_path / folder, *flags)
        if isinstance(found, str):
            with pytest.raises(UserError, match=found):
                find_checkpoint(args)
        else:
            assert find_checkpoint(args) == found
    assert not (tmp_path / "only read").exists()


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("evil-was-here"),))


def test_what_is_no_checkpoint_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(Evil(), "pickle")
    torch.save({"state_dict": {}}, "other")
    half = saved(tmp_path).read_bytes()[:2000]
    for name, content in {"text": b"hello", "empty": b"", "truncated": half}.items():
        Path(name).write_bytes(content)
    for name in ("text", "empty", "truncated", "pickle", "other"):
        with pytest.raises(UserError, match=f"{name} is not a checkpoint") as refused:
            read_checkpoint(tmp_path / name)
        assert "\n" not in str(refused.value)
    assert not Path("evil-was-here").exists()


# --- writing ---


@pytest.mark.parametrize("kills", (30, pytest.param(1000, marks=pytest.mark.full)))
def test_a_kill_at_any_moment_of_a_write_leaves_a_whole_checkpoint(
    kills, tmp_path, record_property
):
    """Nothing whose save() had returned is lost, and nothing is mixed."""
    moments, halves, last = random.Random(0), 0, 0
    output = tmp_path / "run"

    def acknowledged():
        path = output / "acknowledged"
        return int(path.read_text()) if path.exists() else 0

    for _ in range(kills):
        with Ranks(tmp_path, 1, save_for_ever, output=str(output)) as ranks:
            later = partial(lambda last: acknowledged() > last, last)
            wait_until(later, 30, "a save", interval=0.005)
            time.sleep(moments.uniform(0, 0.1))
            ranks.processes[0].kill()
            ranks.processes[0].join()
        halves += bool(list(output.glob("*.pt.tmp")))
        last = whole(read_checkpoint(output / "checkpoint.pt"))
        assert acknowledged() <= last <= acknowledged() + 1
        best = whole(read_checkpoint(output / "best.pt"))
        assert best % 2 == 1 and last - 1 <= best <= last + 1
        record = json.loads((output / "epochs.jsonl").read_text())
        assert record["epoch"] + 1 in (last, last + 1)
    record_property("kills / a process that only saves / kills", kills)
    record_property(
        "kills / a process that only saves / while a file was half written", halves
    )
    assert halves > kills / 20


def whole(content):
    """The number that all tensors of a checkpoint of save_for_ever hold."""
    tensors = list(content["state_dict"].values())
    tensors += [s["momentum_buffer"] for s in content["optimizer"]["state"].values()]
    assert len(tensors) == 4
    assert all((tensor == content["epoch"]).all() for tensor in tensors)
    number = content["epoch"]
    assert number == content["records"][0]["epoch"] + 1
    assert content["best_acc1"] == number - 1 + number % 2
    return number


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    """What a power failure needs: fsync of the file, rename, fsync of the folder."""
    calls, replace = [], os.replace

    def recorded_replace(source, target):
        calls.append(f"{source} becomes {target}")
        replace(source, target)

    def name_of(descriptor):
        return os.readlink(f"/proc/self/fd/{descriptor}")

    monkeypatch.setattr(os, "fsync", lambda file: calls.append(name_of(file)))
    monkeypatch.setattr(os, "replace", recorded_replace)
    target = tmp_path / "file"
    replace_file(target, lambda file: file.write(b"new"))
    assert calls == [f"{target}.tmp", f"{target}.tmp becomes {target}", str(tmp_path)]


def test_a_loader_that_dies_in_a_save_is_not_a_full_disk(tmp_path):
    class Content:
        def __reduce__(self):
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal")

    with pytest.raises(RuntimeError, match="DataLoader worker"):
        replace_file(tmp_path / "file", lambda file: torch.save(Content(), file))
    assert not list(tmp_path.iterdir())


def test_a_lock_that_cannot_be_opened_is_one_line(tmp_path):
    (tmp_path / "lock").mkdir()
    with pytest.raises(UserError, match="cannot write .*lock: Is a directory"):
        lock_output(tmp_path)


def test_without_locks_a_run_trains_and_warns(tmp_path, monkeypatch, capsys):
    refused = OSError(errno.ENOLCK, "no locks")
    monkeypatch.setattr(fcntl, "lockf", Mock(side_effect=refused))
    assert resumed(tmp_path).epoch == 0
    warning = f"warning: cannot keep a second run out of {tmp_path}: no locks"
    assert warning in capsys.readouterr().err


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path):
    before = saved(tmp_path).read_bytes()
    state = resumed(tmp_path / "run")
    step(state, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UserError, match="File too large; any existing file is"):
            state.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == before
    assert not list(tmp_path.rglob("*.tmp"))
