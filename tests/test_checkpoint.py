"""Checkpoints: complete, refused where they do not fit, never half written."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from conftest import ROOT  # noqa: F401

from common.arguments import build_parser, parse_arguments
from common.checkpoint import (
    SavedTensors,
    TrainingState,
    find_checkpoint,
    read_checkpoint,
    replace_file,
    resume,
)
from common.errors import UserError
from common.meters import Averages
from common.schedule import build_scheduler

FIGURES = {"seconds": 1.0}


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
    for number, top1 in enumerate((60.0, 80.0, 70.0), start=1):
        step(state, number)
        finish(state, top1)
        state.save()
    best, last = (torch.load(tmp_path / name) for name in ("best.pt", "checkpoint.pt"))
    assert best["epoch"] == 2 and best["records"][-1]["val_top1"] == 80.0
    assert (
        last["epoch"] == 3
        and last["best_acc1"].item() == best["best_acc1"].item() == 80.0
    )


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
        (("--seed", "3"), "made with --seed 0, now it is 3"),
        (("--lr", "0.3"), "made with --lr 0.1, now it is 0.3"),
        (("--decoder", "pil"), "made with --decoder auto, now it is pil"),
    ],
)
def test_another_recipe_is_refused(tmp_path, flags, message):
    saved(tmp_path)
    args, state = make(tmp_path / "run", "--resume", "auto", *flags)
    with pytest.raises(UserError, match=message):
        resume(args, state)


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


def test_a_run_is_never_overwritten(tmp_path):
    path = saved(tmp_path)
    with pytest.raises(
        UserError, match="go on with --resume auto, or choose another --output"
    ):
        find_checkpoint(make(tmp_path / "run")[0])
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
    assert target.read_text() == "old"
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
