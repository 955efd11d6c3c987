"""Checkpoints: complete, refused where they do not fit, never half written."""

import errno
import fcntl
import json
import os
import pickle
import random
import signal
import socket
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torchvision
from conftest import TINY, wait_until
from ranks import (
    Ranks,
    lock_and_fork,
    run_ranks,
    save_for_ever,
    train,
    train_and_print_saves,
)

from common import checkpoint
from common.arguments import build_parser, parse_arguments
from common.checkpoint import (
    SavedTensors,
    TrainingState,
    check_recipe,
    find_checkpoint,
    lock_output,
    read_checkpoint,
    recipe_of,
    replace_file,
    resume,
)
from common.data import build_datasets, share_out
from common.errors import UserError
from common.meters import Averages
from common.model import build_model
from common.schedule import build_scheduler
from launch.agreement import agree
from launch.check import check

FIGURES = {"seconds": 1.0, "first_step": 0}
HOST = socket.gethostname()


def make(output, *flags, outputs=3):
    """Arguments, and the state of a tiny run."""
    argv = ["--data", "x", "--output", str(output), "--precision", "fp32", *flags]
    args = parse_arguments(build_parser("A test."), "test", argv)
    args.world_size = 2
    torch.manual_seed(args.seed)
    model = torch.nn.Linear(4, outputs)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scheduler = build_scheduler(args, optimizer, 10)
    return args, TrainingState(args, model, optimizer, scheduler, scaler)


def step(state, number):
    torch.manual_seed(number)
    state.optimizer.zero_grad()
    state.raw_model(torch.randn(2, 4)).square().sum().backward()
    state.optimizer.step()
    state.scheduler.step()
    return state.add(
        number, torch.tensor([2.0 * number, 1, 2, 2, 0], dtype=torch.float64)
    )


def finish(state, top1):
    return state.finish_epoch(Averages(0.5, top1, 99.0, 40), FIGURES)


def same(one, other):
    weights, others = one.raw_model.state_dict(), other.raw_model.state_dict()
    momenta = [
        s["momentum_buffer"] for s in one.optimizer.state_dict()["state"].values()
    ]
    others_momenta = [
        s["momentum_buffer"] for s in other.optimizer.state_dict()["state"].values()
    ]
    return (
        all(torch.equal(weights[name], others[name]) for name in weights)
        and len(momenta) == len(others_momenta) == 2
        and all(map(torch.equal, momenta, others_momenta))
        and one.scheduler.get_last_lr() == other.scheduler.get_last_lr()
        and torch.equal(one.sums, other.sums)
        and (one.epoch, one.step, one.best_acc1)
        == (other.epoch, other.step, other.best_acc1)
        and one.records == other.records
    )


def test_a_run_goes_on_from_the_middle_of_an_epoch(tmp_path):
    _, whole = make(tmp_path / "whole")
    _, first = make(tmp_path / "run")
    for state in (whole, first):
        step(state, 1)
        finish(state, 50.0)
        state.save()
        step(state, 1)
    first.save()
    step(whole, 2)
    args, second = make(tmp_path / "run", "--resume", "auto")
    resume(args, second)
    assert (second.epoch, second.step) == (1, 1)
    step(second, 2)
    assert same(whole, second)


def test_keys_of_the_imagenet_example(tmp_path):
    _, state = make(tmp_path)
    step(state, 1)
    finish(state, 75.0)
    state.save()
    content = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert content["epoch"] == 1 and content["arch"] == "resnet18"
    assert content["best_acc1"].item() == 75.0
    model = torch.nn.Linear(4, 3)
    model.load_state_dict(content["state_dict"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer.load_state_dict(content["optimizer"])
    torch.optim.lr_scheduler.StepLR(optimizer, 30).load_state_dict(content["scheduler"])


def test_best_is_kept_when_the_next_epoch_is_worse(tmp_path):
    _, state = make(tmp_path)
    for number, top1 in enumerate((60.0, 80.0, 80.0, 70.0), start=1):
        step(state, number)
        finish(state, top1)
        state.save()
    best, last = (torch.load(tmp_path / name) for name in ("best.pt", "checkpoint.pt"))
    assert best["epoch"] == 2 and best["records"][-1]["val_top1"] == 80.0
    assert (
        last["epoch"] == 4
        and last["best_acc1"].item() == best["best_acc1"].item() == 80.0
    )


@pytest.mark.parametrize("links", (True, False))
def test_the_best_checkpoint_is_one_file_with_two_names_or_a_copy(
    tmp_path, monkeypatch, links
):
    """And stays what it is, also where a killed run left a third name of it."""
    best, last = tmp_path / "best.pt", tmp_path / "checkpoint.pt"
    _, state = make(tmp_path)
    if not links:

        def refused(source, target):
            raise PermissionError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refused)
    for number, top1 in enumerate((60.0, 80.0), start=1):
        step(state, number)
        finish(state, top1)
        state.save()
        assert best.samefile(last) == links
        assert best.read_bytes() == last.read_bytes()
        assert torch.load(last)["epoch"] == number
    monkeypatch.undo()
    before = best.read_bytes()
    os.link(best, tmp_path / "checkpoint.pt.tmp")
    step(state, 3)
    finish(state, 70.0)
    state.save()
    assert torch.load(last)["epoch"] == 3 and best.read_bytes() == before
    assert not list(tmp_path.glob("*.tmp"))


def test_the_first_epoch_in_a_new_folder_is_its_best(tmp_path):
    """Whatever the best was in the folder that it is resumed from."""
    path = saved(tmp_path)
    args, state = make(tmp_path / "new", "--resume", str(path))
    resume(args, state)
    for number, top1, best in ((1, 0.0, 2), (2, 30.0, 3), (3, 20.0, 3)):
        step(state, number)
        state.save()
        finish(state, top1)
        state.save()
        assert torch.load(tmp_path / "new" / "best.pt")["epoch"] == best
    assert state.best_acc1 == 30.0


@pytest.mark.parametrize(
    "stop_at, saves",
    [
        (None, "0 4, 0 8, 1 0, 1 4, 1 8, 2 0"),
        (6, "0 4, 0 6"),
        (8, "0 4, 0 8"),
        (12, "0 4, 0 8, 0 12"),
    ],
)
def test_nothing_is_written_twice(tmp_path, digits, stop_at, saves):
    """Neither at a stop, nor at an epoch's end, also if it is a step to save at."""
    course = "--image-size 32 -b 8 --precision fp32 -j 0 --epochs 2 --max-steps 12"
    course += " --print-interval 1 --checkpoint-steps 4"
    flags = ["--data", digits, *course.split(), "--output", tmp_path / "out"]
    arguments = {"name": "dataparallel", "flags": flags, "stop_at": stop_at}
    with Ranks(tmp_path, 1, train_and_print_saves, **arguments) as ranks:
        assert ranks.end() == [143 if stop_at else 0], ranks.text()
        lines = ranks.text().splitlines()
    found = [line[11:] for line in lines if line.startswith("torch.save ")]
    assert ", ".join(found) == saves


# --- two runs in one folder ---


def free(output):
    """Whether a run could begin there."""
    try:
        lock_output(output).close()
    except UserError:
        return False
    return True


def test_of_two_runs_at_the_same_time_one_is_refused(digits, tmp_path):
    """And the other one goes on; killed, it is no obstacle to the next."""
    output = tmp_path / "out"
    flags = "--image-size 32 -b 48 --precision fp32 --max-steps 5 -j 2 --epochs".split()
    flags = ["--data", digits, "--output", output, "--resume", "auto", *flags]
    arguments = {"name": "distributed", "net": "small", "flags": [*flags, 10_000]}
    with (
        Ranks(tmp_path / "a", 2, train, **arguments) as one,
        Ranks(tmp_path / "b", 2, train, **arguments) as other,
    ):
        runs = [one, other]
        wait_until(lambda: not (one.alive() and other.alive()), 60, "the end of one")
        runs.sort(key=Ranks.alive)
        refused, trains = runs
        assert refused.end(10) == [2, 2], refused.text()
        (line,) = refused.text().strip().splitlines()
        pid = trains.processes[0].pid
        assert line == (
            f"distributed.py: error: another run (process {pid} on {HOST}) is writing "
            f"to {output}; choose another --output"
        )
        lines = output / "epochs.jsonl"
        wait_until(lambda: lines.exists() or not trains.alive(), 60, "an epoch")
        assert trains.alive(0) and trains.alive(1), trains.text()
        for rank in (0, 1):
            trains.signal(rank, signal.SIGKILL)
        trains.end()
    epochs = read_checkpoint(output / "checkpoint.pt")["epoch"]
    arguments["flags"] = [*flags, epochs + 1]
    run_ranks(tmp_path / "c", 2, train, **arguments)
    assert read_checkpoint(output / "checkpoint.pt")["epoch"] == epochs + 1


def test_a_run_s_lock_ends_with_it_whatever_it_forked(pictures, tmp_path):
    """A loader process can outlive the run for a moment."""
    output = tmp_path / "out"
    args, state = make(output)
    args.data, args.global_batch_size = pictures, 4
    args.device, args.image_size = "cpu", 32
    check(args, 1)  # lets go
    with Ranks(tmp_path, 1, lock_and_fork, output=str(output)) as ranks:
        wait_until(lambda: "forked" in ranks.text(), 20, "the lock")
        child = int(ranks.text().split()[-1])
        try:
            with pytest.raises(UserError, match=r"another run \(process \d+ on "):
                resume(args, state)
            with pytest.raises(UserError, match="another run"):
                check(args, 1)
            check(args, 1, world_size=2)  # rank 0 may be elsewhere, and of this run
            args.evaluate, args.resume = True, None
            check(args, 1)
            resume(args, state)
            ranks.signal(0, signal.SIGKILL)
            wait_until(lambda: free(output), 10, "the lock's end")
            os.kill(child, 0)  # is still there
        finally:
            os.kill(child, signal.SIGKILL)


def test_the_lock_of_another_machine_is_waited_for(tmp_path, monkeypatch, capsys):
    """It may have died: an NFS server then keeps its lock for some time."""
    output = tmp_path / "run"
    with Ranks(tmp_path, 1, lock_and_fork, output=str(output)) as ranks:
        wait_until(lambda: "forked" in ranks.text(), 20, "the lock")
        os.kill(int(ranks.text().split()[-1]), signal.SIGKILL)
        (output / "lock").write_text("process 7 on another")
        monkeypatch.setattr(checkpoint, "LEASE_SECONDS", 2)
        with pytest.raises(
            UserError, match=r"another run \(process 7 on another\) is w"
        ):
            lock_output(output)
        said = f"waiting up to 2 s for the lock of process 7 on another on {output}\n"
        assert capsys.readouterr().err.endswith(said)
        monkeypatch.setattr(checkpoint, "LEASE_SECONDS", 60)
        threading.Timer(1.5, ranks.signal, (0, signal.SIGKILL)).start()
        lock_output(output).close()


def test_without_locks_a_run_trains_and_warns_once(tmp_path, monkeypatch, capsys):
    def none(*what):
        raise OSError(number, "no locks")

    monkeypatch.setattr(fcntl, "lockf", none)
    for number in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
        args, state = make(tmp_path / str(number))
        resume(args, state)
        assert state.lock is None
        (line,) = capsys.readouterr().err.splitlines()
        assert f"warning: the file system of {tmp_path / str(number)} has no l" in line
    number = errno.EIO
    with pytest.raises(UserError, match="cannot lock .*/lock: no locks"):
        resume(*make(tmp_path / "broken"))


def test_a_stop_during_validation_is_followed(tmp_path):
    _, state = make(tmp_path)
    step(state, 1)
    state.finish_epoch(Averages(0.5, 50.0, 99.0, 40, stop=True), FIGURES)
    assert state.stop_requested and state.position == "epoch 1"
    step(state, 1)
    finish(state, 50.0)
    assert not state.stop_requested


def test_epochs_jsonl_follows_the_checkpoint(tmp_path):
    _, state = make(tmp_path)
    for number in (1, 2):
        step(state, number)
        finish(state, 50.0)
        state.save()
    lines = (tmp_path / "epochs.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["epoch"] for record in records] == [
        0,
        1,
    ] and records == state.records
    assert records[0]["train_loss"] == 1.0 and records[0]["images"] == 2
    assert records[0]["train_top1"] == 50.0 and records[0]["val_images"] == 40


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    _, state = make(tmp_path)
    sums = torch.tensor([float("nan"), 0, 0, 8, 0], dtype=torch.float64)
    with pytest.raises(
        UserError, match=r"the loss became nan by step 7 of epoch 1 at learning rate"
    ):
        state.add(7, sums)


def saved(tmp_path, *flags):
    _, state = make(tmp_path / "run", *flags)
    step(state, 1)
    finish(state, 50.0)
    state.save()
    return tmp_path / "run" / "checkpoint.pt"


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--arch", "resnet50"), "made with --arch resnet18, now it is resnet50"),
        (("-b", "128"), "made with --global-batch-size 256, now it is 128"),
        (("--pretrained",), "made with --pretrained not given, now it is given"),
        (("--seed", "3"), "made with --seed 0, now it is 3"),
        (("--lr", "0.3"), "made with --lr 0.1, now it is 0.3"),
        (("--warmup-epochs", "1"), "with --warmup-epochs 5.0, now it is 1.0"),
        (("--schedule", "cosine"), "with --schedule step, now it is cosine"),
        (("--momentum", "0.8"), "with --momentum 0.9, now it is 0.8"),
        (("--weight-decay", "0"), "with --weight-decay 0.0001, now it is 0.0"),
        (("--label-smoothing", "0.1"), "with --label-smoothing 0.0, now it is 0.1"),
        (("--image-size", "192"), "with --image-size 224, now it is 192"),
        (("--min-crop", "0.2"), "with --min-crop 0.08, now it is 0.2"),
        (("--no-flip",), "with --no-flip not given, now it is given"),
        (("--max-steps", "9"), "with --max-steps not given, now it is 9"),
        (("--precision", "bf16"), "with --precision fp32, now it is bf16"),
        (("--decoder", "pil"), "made with --decoder auto, now it is pil"),
    ],
)
def test_another_recipe_is_refused(tmp_path, flags, message):
    saved(tmp_path)
    args, state = make(tmp_path / "run", "--resume", "auto", *flags)
    with pytest.raises(UserError, match=message):
        resume(args, state)


def test_the_check_before_a_launch_looks_at_all_processes_and_the_checkpoint(
    pictures, tmp_path
):
    flags = ("--data", str(pictures), "-b", "4", "--image-size", "32", "-j", "0")
    flags = (*flags, "--device", "cpu")
    _, state = make(tmp_path, *flags)
    step(state, 1)
    state.save()
    for given, processes, world_size, said in (
        ((), 1, None, None),
        (("--lr", "0.3"), 1, None, "made with --lr 0.1, now it is 0.3"),
        ((), 2, None, "cannot be divided evenly by 6 processes"),  # on 3 machines
        ((), 2, 8, "cannot be divided evenly by 8 processes"),
        (("--image-size", "1", "--arch", "alexnet"), 1, None, "cannot train on images"),
    ):
        args, _ = make(tmp_path, *flags, "--resume", "auto", *given)
        args.precision = None  # as without the flag: the device decides
        args.nnodes = 3 if said and " 6 " in said else 1
        with pytest.raises(UserError, match=said) if said else nullcontext():
            check(args, processes, world_size)
    args.backend = "nccl"
    with pytest.raises(UserError, match="--backend nccl: it does not go with --dev"):
        check(args, 1)


def test_validation_builds_the_network_that_was_trained(tmp_path):
    """GoogLeNet with pretrained weights scales its input; what is saved does not say so."""
    path = saved(tmp_path, "--pretrained")
    args, state = make(tmp_path / "new", "--resume", str(path), "--evaluate")
    with pytest.raises(
        UserError, match="with --pretrained given, now it is not given: give"
    ):
        resume(args, state)
    with pytest.raises(
        UserError, match="with --pretrained given, now it is not given: give"
    ):
        check_recipe(path, read_checkpoint(path), recipe_of(args))
    flags = ("--resume", str(path), "--evaluate", "--pretrained", "--lr", "7")
    resume(*make(tmp_path / "new", *flags))


def test_more_epochs_are_allowed(tmp_path):
    saved(tmp_path)
    args, state = make(tmp_path / "run", "--resume", "auto", "--epochs", "120")
    resume(args, state)
    assert state.epoch == 1


def test_more_epochs_under_the_cosine_are_another_recipe(tmp_path):
    saved(tmp_path, "--schedule", "cosine")
    flags = ("--schedule", "cosine", "--epochs", "120")
    args, state = make(tmp_path / "run", "--resume", "auto", *flags)
    with pytest.raises(UserError, match="made with --epochs 90, now it is 120"):
        resume(args, state)


def test_the_recorded_learning_rate_is_that_of_the_last_step(tmp_path):
    _, state = make(tmp_path, "--warmup-epochs", "1")
    before = state.optimizer.param_groups[0]["lr"]
    step(state, 1)
    assert finish(state, 50.0)["learning_rate"] == pytest.approx(before)
    assert state.optimizer.param_groups[0]["lr"] > before


def test_weights_of_another_shape_are_refused(tmp_path):
    path = saved(tmp_path)
    args, state = make(tmp_path / "other", "--resume", str(path), outputs=5)
    with pytest.raises(UserError, match="does not fit this model"):
        resume(args, state)
    args, state = make(tmp_path / "other", "--resume", str(path))
    state.raw_model = torch.nn.Sequential(state.raw_model)  # has other names
    with pytest.raises(UserError, match="does not fit this model"):
        resume(args, state)
    args.evaluate = True
    with pytest.raises(UserError, match="does not fit this model"):
        resume(args, state)


def with_images(*where):
    """What agree() says of the images of a folder, or of --synthetic ones."""
    words = [*map(str, where), *TINY]
    args = parse_arguments(build_parser("A test."), "test", words)
    share_out(args, 0, 1, 1)
    sets = build_datasets(args)
    return agree(args, 0, torch.device("cpu"), lambda sums: sums, *sets)


def less(pictures):
    for folder in sorted((pictures / "train").iterdir()):
        for number in range(3):
            (folder / f"{number}.JPEG").unlink()


def renamed(pictures):
    (pictures / "val" / "cat" / "3.JPEG").rename(pictures / "val" / "cat" / "4.JPEG")


@pytest.mark.parametrize(
    "change, said",
    [
        (less, "16 training images, now there are 10: give the same --data, or "),
        (renamed, "8 validation images, now there are 8 with other names: give "),
    ],
)
def test_other_images_are_refused(pictures, tmp_path, change, said):
    """But not where they are only validated."""
    args, state = make(tmp_path / "run")
    resume(args, state, with_images("--data", pictures))
    step(state, 1)
    finish(state, 50.0)
    state.save()
    moved = pictures.rename(tmp_path / "elsewhere")
    args, state = make(tmp_path / "run", "--resume", "auto")
    resume(args, state, with_images("--data", moved))
    assert state.epoch == 1
    change(moved)
    file = tmp_path / "run" / "checkpoint.pt"
    args, state = make(tmp_path / "run", "--resume", "auto")
    with pytest.raises(UserError, match=f"{file} was made with {said}"):
        resume(args, state, with_images("--data", moved))
    args.evaluate = True
    resume(args, state, with_images("--data", moved))


def test_of_images_without_paths_the_number_is_compared(tmp_path):
    args, state = make(tmp_path)
    resume(args, state, with_images("--synthetic", 50))
    state.save()
    args, state = make(tmp_path, "--resume", "auto")
    resume(args, state, with_images("--synthetic", 50))
    with pytest.raises(UserError, match="with 50 training images, now there are 40:"):
        resume(args, state, with_images("--synthetic", 40))


def test_a_run_is_never_overwritten(tmp_path):
    path = saved(tmp_path)
    with pytest.raises(
        UserError, match="go on with --resume auto, or choose another --output"
    ):
        find_checkpoint(make(tmp_path / "run")[0])
    evaluate = ("--evaluate", "--pretrained")
    assert find_checkpoint(make(tmp_path / "run", *evaluate)[0]) is None
    assert find_checkpoint(make(tmp_path / "new", *evaluate)[0]) is None
    assert not (tmp_path / "new").exists()
    assert find_checkpoint(make(tmp_path / "new")[0]) is None
    assert find_checkpoint(make(tmp_path / "new", "--resume", "auto")[0]) is None
    assert find_checkpoint(make(tmp_path / "run", "--resume", "auto")[0]) == path
    assert find_checkpoint(make(tmp_path / "run", "--resume", str(path))[0]) == path
    with pytest.raises(
        UserError, match="--resume auto: there is no .*new/checkpoint.pt"
    ):
        find_checkpoint(make(tmp_path / "new", "--resume", "auto", "--evaluate")[0])
    other = saved(tmp_path / "second")
    with pytest.raises(UserError, match="holds another run's checkpoint"):
        find_checkpoint(make(tmp_path / "run", "--resume", str(other))[0])
    with pytest.raises(UserError, match="there is no such file"):
        find_checkpoint(make(tmp_path / "new", "--resume", str(tmp_path / "no.pt"))[0])


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("evil-was-here"),))


@pytest.mark.parametrize("kind", ("text", "truncated", "empty", "pickle", "other"))
def test_what_is_no_checkpoint_is_refused(tmp_path, kind, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path)
    whole = path.read_bytes()
    if kind == "other":
        torch.save({"state_dict": {}}, path)
    else:
        contents = {
            "text": b"hello",
            "truncated": whole[: len(whole) // 2],
            "empty": b"",
        }
        path.write_bytes(
            contents.get(kind) or (pickle.dumps(Evil()) if kind == "pickle" else b"")
        )
    with pytest.raises(UserError, match="no checkpoint") as refused:
        read_checkpoint(path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)
    assert not Path("evil-was-here").exists()


def test_a_kill_at_any_moment_of_a_write_leaves_a_whole_checkpoint(
    tmp_path, figure, request
):
    """Nothing whose save() had returned is lost, and nothing is mixed."""
    moments, halves, last = random.Random(0), 0, 0
    kills = 1000 if request.config.getoption("full") else 100
    output = tmp_path / "run"
    for _ in range(kills):
        with Ranks(tmp_path, 1, save_for_ever, output=str(output)) as ranks:
            before = last
            wait_until(
                lambda before=before: number_in(output / "acknowledged") > before,
                30,
                "a save",
                interval=0.005,
            )
            time.sleep(moments.uniform(0, 0.1))
            ranks.processes[0].kill()
            ranks.processes[0].join()
        acknowledged = number_in(output / "acknowledged")
        halves += bool(list(output.glob("*.pt.tmp")))
        last = whole(read_checkpoint(output / "checkpoint.pt"))
        assert acknowledged <= last <= acknowledged + 1
        best = whole(read_checkpoint(output / "best.pt"))
        assert best % 2 == 1 and last - 1 <= best <= last + 1
        record = json.loads((output / "epochs.jsonl").read_text())
        assert record["epoch"] + 1 in (last, last + 1)
    figure("kills in a write", [kills, halves])
    assert halves > kills / 20  # of them came while a file was half written


def number_in(path):
    return int(path.read_text()) if path.exists() else 0


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
    calls, fsync, replace = [], os.fsync, os.replace

    def recorded_fsync(descriptor):
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def recorded_replace(source, target):
        calls.append(("replace", str(source), str(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    target = tmp_path / "file"
    replace_file(target, lambda file: file.write(b"new"))
    assert calls == [
        ("fsync", f"{target}.tmp"),
        ("replace", f"{target}.tmp", str(target)),
        ("fsync", str(tmp_path)),
    ]


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    path = saved(tmp_path)
    before = path.read_bytes()
    _, state = make(tmp_path / "run")
    step(state, 1)
    with torch.no_grad():
        state.raw_model.weight[0, 0] = float("inf")
    with pytest.raises(
        UserError, match="a weight is not finite by step 1 of epoch 1 at"
    ):
        state.save()
    assert path.read_bytes() == before


def test_a_validation_loss_that_is_not_finite_ends_the_run(tmp_path):
    _, state = make(tmp_path)
    step(state, 3)
    with pytest.raises(
        UserError, match="the validation loss became nan by step 3"
    ) as e:
        state.finish_epoch(Averages(float("nan"), 10.0, 50.0, 40), FIGURES)
    assert "from before" not in str(e.value)  # there is no earlier file
    finish(state, 50.0)
    state.save()
    step(state, 4)
    with pytest.raises(UserError, match=r"best.pt is from before"):
        state.finish_epoch(Averages(float("inf"), 10.0, 50.0, 40), FIGURES)


def test_the_best_accuracy_survives_a_resume(tmp_path):
    _, state = make(tmp_path / "run")
    for number, top1 in ((1, 60.0), (2, 80.0)):
        step(state, number)
        finish(state, top1)
        state.save()
    args, second = make(tmp_path / "run", "--resume", "auto")
    resume(args, second)
    assert second.best_acc1 == 80.0
    step(second, 3)
    finish(second, 70.0)
    second.save()
    best, last = (
        torch.load(tmp_path / "run" / n) for n in ("best.pt", "checkpoint.pt")
    )
    assert (best["epoch"], last["epoch"], last["best_acc1"].item()) == (2, 3, 80.0)


@pytest.mark.parametrize("arch", ("resnet18", "mobilenet_v3_small", "squeezenet1_1"))
def test_plain_torchvision_takes_the_weights(tmp_path, arch):
    """Compiled and channels_last or not, the names are torchvision's."""
    for flags in ((), ("--no-channels-last",), ("--compile",)):
        argv = ["--data", "x", "--arch", arch, *flags]
        args = parse_arguments(build_parser("A test."), "test", argv)
        weights = build_model(args, 1000).state_dict()
        torch.save({"state_dict": weights}, tmp_path / "file.pt")
        content = torch.load(tmp_path / "file.pt", weights_only=True)
        getattr(torchvision.models, arch)().load_state_dict(content["state_dict"])


def test_a_failed_write_leaves_the_old_file(tmp_path):
    target = tmp_path / "file"
    target.write_text("old")

    def full_disk(file):
        file.write(b"ne")
        raise OSError(28, "No space left on device")

    with pytest.raises(
        UserError, match="No space left on device; what was there is untouched"
    ):
        replace_file(target, full_disk)
    assert target.read_text() == "old" and len(list(tmp_path.iterdir())) == 1
    replace_file(target, lambda file: file.write(b"new"))
    assert target.read_text() == "new" and [
        path.name for path in tmp_path.iterdir()
    ] == ["file"]


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write .*file/sub/x"):
        replace_file(tmp_path / "file" / "sub" / "x", lambda file: None)


def test_tensors_beside_the_optimizer_are_filled_in_place():
    tensors = [torch.nn.Parameter(torch.zeros(3)), torch.zeros(2)]
    saved_tensors = SavedTensors([torch.ones(3), torch.full((2,), 2.0)]).state_dict()
    SavedTensors(tensors).load_state_dict(saved_tensors)
    assert tensors[0].tolist() == [1, 1, 1] and tensors[1].tolist() == [2, 2]


def test_a_read_only_folder_is_named_as_such(tmp_path, monkeypatch):
    """Path.mkdir meets a missing parent first, which is not the reason."""

    def read_only(*args, **options):
        try:
            raise FileNotFoundError(2, "No such file or directory")
        except FileNotFoundError:
            raise PermissionError(13, "Permission denied") from None

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(UserError, match="cannot write .*: Permission denied"):
        replace_file(tmp_path / "a" / "b", lambda file: None)


def test_a_loader_process_that_dies_during_a_save_is_not_taken_for_a_bad_disk(tmp_path):
    """PyTorch notices its death in a signal handler, so wherever the process happens to be."""
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"old")

    class Interrupted:
        """A file in the middle of whose third write the signal arrives."""

        writes = 0

        def __init__(self, file):
            self.file = file

        def write(self, content):
            self.writes += 1
            if self.writes == 3:
                raise RuntimeError(
                    "DataLoader worker (pid 7) is killed by signal: Killed."
                )
            return self.file.write(content)

        def flush(self):
            self.file.flush()

    def write(file):
        torch.save([torch.zeros(100_000), torch.zeros(100_000)], Interrupted(file))

    with pytest.raises(RuntimeError, match=r"^DataLoader worker \(pid 7\)"):
        replace_file(path, write)
    assert path.read_bytes() == b"old"
