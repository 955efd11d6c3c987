"""Checkpoints are complete and never half written, and a run rejects one that does not match."""

import fcntl
import json
import os
import random
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import wait_until
from ranks import Images, Ranks, parse, save_for_ever

from common import checkpoint
from common.checkpoint import Checkpoint, replace_file
from common.data import build_datasets
from common.errors import UserError
from common.model import build_scheduler

STATS = {"seconds": 83.0, "images_per_second": 5120.4, "learning_rate": 0.1}
IMAGES = Images(50), Images(20)
CPU = torch.device("cpu")
FLAGS = "--data x --precision fp16 --lr 0.1"


def make(output, *flags, images=IMAGES):
    """Return the state of a new run of a tiny network."""
    args = parse(*FLAGS.split(), "--output", output, *flags)
    torch.manual_seed(args.seed)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    objects = {"state_dict": model, "optimizer": optimizer}
    objects["scheduler"] = build_scheduler(args, optimizer, 10)
    objects["scaler"] = torch.amp.GradScaler("cpu")
    return Checkpoint(args, images, objects)


def load(run, rank=0):
    """Load the checkpoint that --resume names; release the lock, as if the process had ended."""
    run.load(rank)
    if not run.args.evaluate:
        run.lock.close()
    return run


def resumed(output, *flags, **how):
    """Return the state of a new process that resumes the run."""
    return load(make(output, "--resume", *flags, **how))


def step(run, number):
    model, optimizer, scheduler, scaler = run.objects.values()
    torch.manual_seed(number)
    optimizer.zero_grad()
    scaler.scale(model(torch.randn(2, 4)).square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    sums = {"loss": 2.0 * number, "top1": 100, "top5": 200, "images": 2}
    sums = {name: torch.tensor(float(value)) for name, value in sums.items()}
    run.record_interval(number, sums)


def finish(run, top1):
    val = {"loss": 0.5, "top1": top1, "top5": 99.0, "images": 40}
    run.record_epoch(val, STATS)


def train_epochs(run, *top1):
    """Train epochs of one step each, and save each of them."""
    for accuracy in top1:
        step(run, 1)
        finish(run, accuracy)
        run.save()


def saved(tmp_path, *flags):
    train_epochs(load(make(tmp_path / "run", *flags)), 50.0)
    return tmp_path / "run" / "checkpoint.pt"


def read(path):
    return torch.load(path, map_location="cpu", weights_only=True)


# --- the contents of a checkpoint ---


def test_best_is_kept_when_the_next_epoch_is_no_better(tmp_path, monkeypatch):
    """A resumed run keeps best.pt, too; in float32, 200 / 3 would be rounded differently."""
    train_epochs(load(make(tmp_path)), 60.0, 200 / 3)
    loaded = Mock(side_effect=torch.load)
    monkeypatch.setattr(torch, "load", loaded)
    run = resumed(tmp_path)
    assert loaded.call_args.kwargs == {"map_location": "cpu", "weights_only": True}
    assert run.best == 200 / 3
    train_epochs(run, 200 / 3, 50.0)
    best, last = read(tmp_path / "best.pt"), read(tmp_path / "checkpoint.pt")
    assert (best["epoch"], last["epoch"]) == (2, 4)
    assert best["best_acc1"].item() == last["best_acc1"].item()
    lines = (tmp_path / "epochs.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["epoch"] for record in records] == [0, 1, 2, 3]
    assert records == run.records
    assert records[0]["train_loss"] == 1.0 and records[0]["images"] == 2
    assert records[0]["train_top1"] == 50.0 and records[0]["val_images"] == 40


def test_the_first_epoch_in_a_new_folder_is_its_best(tmp_path):
    """If a run resumes from another folder, that folder's best checkpoint does not matter."""
    run = load(make(tmp_path / "new", "--resume", saved(tmp_path)))
    for top1, best in ((0.0, 2), (30.0, 3), (20.0, 3)):
        step(run, 1)
        run.save()
        finish(run, top1)
        run.save()
        assert read(tmp_path / "new" / "best.pt")["epoch"] == best


def test_a_run_saves_once_save_minutes_have_passed(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[-1])
    run = load(make(tmp_path, "--save-minutes", 2))
    step(run, 1)
    for seconds, files in ((119.0, 0), (120.0, 1), (239.0, 0), (240.0, 1)):
        clock.append(seconds)
        run.save_if_due()
        assert len(list(tmp_path.glob("checkpoint.pt"))) == files
        (tmp_path / "checkpoint.pt").unlink(missing_ok=True)


# --- refusals ---


def test_numbers_that_are_not_finite_end_the_run(tmp_path):
    before = saved(tmp_path).read_bytes()
    run = resumed(tmp_path / "run")
    for loss in ("nan", "inf"):
        sums = {"loss": torch.tensor(float(loss)), "images": torch.tensor(8.0)}
        with pytest.raises(UserError, match=f"loss is {loss} by step 7: lower --lr"):
            run.record_interval(7, sums)
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == before


def test_another_recipe_is_refused(tmp_path):
    saved(tmp_path)
    saved(tmp_path / "b", "--schedule", "cosine", "--pretrained")
    for flags, message in (
        ("--arch resnet50", "with arch = resnet18, now it is resnet50: use the same"),
        ("--lr 0.3", "with lr = 0.1, now it is 0.3"),
        ("--seed 1", "with seed = 0, now it is 1"),
        ("--no-flip", "with no_flip = False, now it is True"),
        ("--precision bf16", "with precision = fp16, now it is bf16"),
        ("--decoder pil", "with decoder = torchcodec, now it is pil"),
        ("--evaluate --arch vgg11", "with arch = resnet18, now it is vgg11"),
        ("--evaluate --lr 7 --seed 3", None),
        ("--epochs 120 -j 3 --save-minutes 7 --compile --print-interval 3", None),
    ):
        with pytest.raises(UserError, match=message) if message else nullcontext():
            resumed(tmp_path / "run", *flags.split())
    for pretrained, folder in enumerate(("run", "b/run")):
        run = resumed(tmp_path / folder, "--evaluate")  # GoogLeNet uses transform_input
        assert run.objects["state_dict"].transform_input == bool(pretrained)
    free = "data synthetic output resume evaluate workers print_interval compile save_minutes accumulate epochs"
    assert {*vars(run.args)} - run.recipe.keys() == {*free.split()}
    with pytest.raises(UserError, match="with classes = 3, now it is 4"):
        resumed(tmp_path / "run", "--evaluate", images=(Images(50, 4), Images(20, 4)))
    with pytest.raises(UserError, match="with epochs = 90, now it is 9:"):
        resumed(tmp_path / "b/run", "--pretrained", "--schedule=cosine", "--epochs=9")


def test_other_images_are_refused(pictures, tmp_path):
    """A run rejects other images, but not a folder that has only moved; --evaluate accepts any."""

    def images_of(folder):
        return build_datasets(parse("--data", folder, "--output", tmp_path))

    output = tmp_path / "run"
    train_epochs(load(make(output, images=images_of(pictures))), 50.0)
    moved = pictures.rename(tmp_path / "elsewhere")
    assert resumed(output, images=images_of(moved)).epoch == 1
    (moved / "val" / "cat" / "3.JPEG").rename(moved / "val" / "cat" / "4.JPEG")
    for images in (images_of(moved), (Images(50, 2), Images(20, 2))):
        line = r"with images = 16 \(digest \d+\), 8 \(.*: use the same"
        with pytest.raises(UserError, match=line):
            resumed(output, images=images)
    resumed(output, "--evaluate", images=images_of(moved))


def test_a_run_is_never_overwritten(tmp_path):
    path, other = saved(tmp_path), saved(tmp_path / "second")
    evaluate = ("--evaluate", "--pretrained")
    for folder, flags, outcome in (
        ("run", (), "holds another run: add --resume, or choose another --output"),
        ("run", ("--resume", other), "holds another run"),
        ("run", evaluate, 0),
        ("only read", evaluate, 0),
        ("new", (), 0),
        ("new", ("--resume",), 0),
        ("run", ("--resume",), 1),
        ("run", ("--resume", path), 1),
        ("run", ("--resume", tmp_path / "second" / ".." / "run" / path.name), 1),
        ("only read", ("--resume", "--evaluate"), "cannot be loaded: FileNotFound"),
        ("new", ("--resume", tmp_path / "no.pt"), "no.pt cannot be loaded: FileNot"),
    ):
        run, text = make(tmp_path / folder, *flags), isinstance(outcome, str)
        with pytest.raises(UserError, match=outcome) if text else nullcontext():
            assert load(run).epoch == outcome
    assert not (tmp_path / "only read").exists()


def test_two_runs_cannot_write_to_one_folder(tmp_path):
    """The lock is released when its process ends for any reason; --evaluate takes no lock."""
    output = tmp_path / "out"
    output.mkdir()
    with Ranks(tmp_path / "ranks", 1, save_for_ever, output=str(output)) as ranks:
        wait_until((output / "checkpoint.pt").exists, 60, ranks.text, interval=0.005)
        with pytest.raises(UserError, match=f"another .* to --output {output}: let it"):
            load(make(output, "--resume"))
        load(make(output, "--evaluate", "--pretrained"))
        ranks.processes[0].kill()
        ranks.processes[0].join()
    with pytest.raises(UserError, match="holds another run"):
        load(make(output))
    holder = make(tmp_path / "new")
    holder.load(0)
    with pytest.raises(UserError, match=f"another .* to --output {holder.args.output}"):
        make(tmp_path / "new", "--resume").load(0)


def test_a_file_system_without_locks_is_no_error(tmp_path, monkeypatch):
    lacks = Mock(side_effect=OSError(38, "not implemented"))
    monkeypatch.setattr(fcntl, "flock", lacks)
    assert load(make(tmp_path)).epoch == 0


@pytest.mark.parametrize("metric, lower", (("val_loss", True), ("val_top5", False)))
def test_best_may_be_the_lowest_of_another_metric(metric, lower, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "BEST_METRIC", metric)
    monkeypatch.setattr(checkpoint, "LOWER_IS_BETTER", lower)
    run = load(make(tmp_path))
    for epoch, (loss, top5, best) in enumerate(((3, 5, 1), (1, 9, 2), (2, 8, 2)), 1):
        step(run, 1)
        val = {"loss": float(loss), "top1": 7.0, "top5": float(top5), "images": 40}
        run.record_epoch(val, STATS)
        run.save()
        run = resumed(tmp_path)
        assert (read(tmp_path / "best.pt")["epoch"], run.epoch) == (best, epoch)


def test_an_unknown_best_metric_is_one_line_before_training(tmp_path, monkeypatch):
    for metric, known in (("val_f1", False), ("top1", False), ("val_images", True)):
        monkeypatch.setattr(checkpoint, "BEST_METRIC", metric)
        line = f"BEST_METRIC {metric} is none of val_loss, val_top1, val_top5, val_im"
        with nullcontext() if known else pytest.raises(UserError, match=line):
            make(tmp_path)


def test_what_a_checkpoint_lacks_is_named(tmp_path):
    """The error names each missing entry; for example, only Apex's script saves `amp`."""
    path = saved(tmp_path)
    run = make(tmp_path / "run", "--resume", path)
    run.objects["amp"] = Mock()
    with pytest.raises(UserError, match="checkpoint.pt has no amp: resume with the"):
        load(run)


def test_own_datasets_are_compared_by_what_they_have(tmp_path):
    one, other = Images(50), Images(50)
    one.targets, other.targets = [0, 1, 2], torch.tensor([0, 1, 1])
    train_epochs(load(make(tmp_path, images=(one, one))), 50.0)
    assert resumed(tmp_path, images=(one, one)).epoch == 1
    with pytest.raises(UserError, match="with images = 50"):
        resumed(tmp_path, images=(one, other))


def test_what_a_run_prints(tmp_path, capsys, monkeypatch):
    """An epoch's line has at most 120 characters, even in a long run."""
    run = load(make(tmp_path, "--accumulate", 2))
    run.print_header(CPU, 1, 5004)
    name, decoder, images, steps, start = capsys.readouterr().out.splitlines()
    assert name == "resnet18 (Linear), 15 parameters, fp16, 1 x CPU"
    assert decoder.startswith("decoder ")
    assert images == "50 training and 20 validation images of 3 classes"
    assert steps == (
        "5,004 steps per epoch, 256 images per step: 1 process x 128 images x 2 "
        "micro-batches, learning rate 0.1"
    )
    assert start == f"{tmp_path}: a new run"
    run.args.evaluate, run.args.decoder = True, "pil"
    monkeypatch.setattr(checkpoint, "NO_TORCHCODEC", "no FFmpeg")
    run.print_header(CPU, 4, 0)
    _, decoder = capsys.readouterr().out.splitlines()
    assert decoder == "decoder pil (no TorchCodec: no FFmpeg)"
    run.args.evaluate = False
    step(run, 1)
    run.save()
    run = resumed(tmp_path)
    run.print_header(CPU, 1, 5004)
    assert capsys.readouterr().out.endswith(": resumed from epoch 1, step 1\n")
    run.epoch = 80
    finish(run, 200 / 3)
    run.records[-1] |= {"images_per_second": 15120.4, "seconds": 3852.0}
    run.records[-1] |= {"train_loss": 0.51234, "val_loss": 0.51234}
    run.save()
    run.print_epoch()
    line = capsys.readouterr().out
    assert len(line) <= 121 and line == (
        "epoch 81/90: loss 0.5123, top-1 50.00 %; val loss 0.5123, top-1 66.67 %, "
        "best 66.67 %; 15120 images/s, 1:04:12, saved\n"
    )
    run.epoch = 90
    run.print_header(CPU, 1, 5004)
    assert capsys.readouterr().out.endswith(": complete: all 90 epochs are done\n")


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
        with pytest.raises(UserError, match=f"--resume {name} cannot be loaded"):
            load(make(tmp_path / "new", "--resume", name))
    assert not Path("evil-was-here").exists()


@pytest.mark.parametrize(
    "other", ({"epoch": 2}, {"step": 3}, {"images": [50, 2**48 - 2]})
)
def test_a_process_that_found_another_checkpoint_is_named(other, tmp_path):
    """Ranks find different checkpoints if, for example, --output differs between machines."""
    saved(tmp_path)
    tables = []
    for rank in range(3):
        run = resumed(tmp_path / "run")
        run.images = [50, 2**48 - 1]
        vars(run).update(other if rank == 2 else {})
        run.compare_ranks(rank, 3, CPU, lambda table: tables.append(table) or 0 * table)
    for rank in range(3):
        with pytest.raises(UserError, match="rank 2 has different images or another"):
            run.compare_ranks(rank, 3, CPU, lambda _: sum(tables))


# --- writing ---


@pytest.mark.parametrize("kills", (12, pytest.param(1000, marks=pytest.mark.full)))
def test_a_kill_at_any_moment_of_a_write_leaves_a_whole_checkpoint(
    kills, tmp_path, record_property
):
    """After save() has returned, its checkpoint is never lost; no checkpoint mixes two states."""
    moments, halves, last = random.Random(0), 0, 0
    output = tmp_path / "run"
    output.mkdir()

    def acknowledged():
        path = output / "acknowledged"
        return int(path.read_text()) if path.exists() else 0

    for _ in range(kills):
        with Ranks(tmp_path, 1, save_for_ever, output=str(output)) as ranks:
            later = partial(lambda last: acknowledged() > last, last)
            wait_until(later, 60, ranks.text, interval=0.005)
            time.sleep(moments.uniform(0, 0.1))
            ranks.processes[0].kill()
            ranks.processes[0].join()
        halves += bool(list(output.glob("*.pt.tmp")))
        last = whole(read(output / "checkpoint.pt"))
        assert acknowledged() <= last <= acknowledged() + 1
        best = whole(read(output / "best.pt"))
        assert best % 2 == 1 and last - 1 <= best <= last + 1
        record = json.loads((output / "epochs.jsonl").read_text())
        assert record["epoch"] + 1 in (last, last + 1)
    record_property("kills / a process that only saves / kills", kills)
    record_property("kills / a process that only saves / half written files", halves)
    assert halves


def whole(content):
    """Return the number that fills all tensors of a checkpoint from save_for_ever."""
    tensors = list(content["state_dict"].values())
    tensors += [s["momentum_buffer"] for s in content["optimizer"]["state"].values()]
    assert len(tensors) == 4
    assert all((tensor == content["epoch"]).all() for tensor in tensors)
    number = content["epoch"]
    assert number == content["records"][0]["epoch"] + 1
    assert content["best_acc1"] == number - 1 + number % 2
    return number


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    """The file is flushed before the rename; otherwise, a power failure could leave it empty."""
    calls, replace = [], os.replace

    def recorded_replace(source, target):
        calls.append((source.read_bytes(), target))
        replace(source, target)

    def fsync(descriptor):
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).read_bytes())

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    replace_file(tmp_path / "file", b"new")
    assert calls == [b"new", (b"new", tmp_path / "file")]
