"""Test launched training, its files and output, evaluation, curves, and bad input."""

import json
import shutil
import signal
import sys
from argparse import Namespace

import pytest
import torch
from conftest import TINY, launcher
from ranks import Ranks, run_ranks, train, train_compiled
from test_units import Batches
from torchvision.models import resnet18

import distributed
from scripts import quickstart

NAMES = "loss top1 top5 images".split()
TIMED = "seconds images_per_second data_wait peak_memory_mib".split()
FLAGS = "--image-size 32 -b 64 --lr 0.2 --warmup-epochs 1 --schedule cosine -j 0 "
FLAGS += "--min-crop 0.5 --no-flip --epochs 2 --max-steps 2 --precision fp32"
FLAGS = FLAGS.split()


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    """Return the output folder of a run with two processes that no launcher started."""
    folder = tmp_path_factory.mktemp("trained")
    flags = ["--data", digits, *FLAGS, "--output", folder / "out"]
    run_ranks(folder, 2, train, name="distributed", flags=flags)
    return folder / "out"


def records(output):
    return [*map(json.loads, (output / "epochs.jsonl").read_text().splitlines())]


def checkpoint(output):
    return torch.load(output / "checkpoint.pt", weights_only=True)


def test_a_launched_training_is_the_same(trained, digits, tmp_path):
    """With torchrun, the results are bit-for-bit identical, and the log contains the records."""
    flags = ("--data", digits, *FLAGS, "--output", tmp_path / "out", "--local-rank=0")
    ended = launcher("distributed", *flags, NPROC="2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    epochs = records(tmp_path / "out")
    assert [record["epoch"] for record in epochs] == [0, 1]
    same = [f"{part}_{name}" for part in ("train", "val") for name in NAMES]
    same[same.index("train_images")] = "images"
    for one, other in zip(records(trained), epochs, strict=True):
        assert set(other) == {"epoch", "steps", "learning_rate", *same, *TIMED}
        assert {n: one[n] for n in same} == {n: other[n] for n in same}
        counts = other["steps"], other["images"], other["val_images"]
        assert counts == (2, 128, 359)
        best = max(one["val_top1"] for one in epochs[: other["epoch"] + 1])
        printed = (
            "epoch {}/2: loss {train_loss:.4g}, top-1 {train_top1:.2f} %; val loss "
            "{val_loss:.4g}, top-1 {val_top1:.2f} %, best {best:.2f} %; "
            "{images_per_second:.0f} images/s, {seconds:.1f} s, saved\n"
        )
        line = printed.format(other["epoch"] + 1, best=best, **other)
        assert line in ended.stdout and len(line) <= 121
    contents = map(checkpoint, (tmp_path / "out", trained))
    ends = ([one["state_dict"], one["optimizer"]["state"]] for one in contents)
    torch.testing.assert_close(*ends, rtol=0, atol=0)


# One more process than needed causes one more batch, which has one image
EVALUATED = [("dataparallel", 1, 2048), ("distributed", 3, 3 * 119)]
EVALUATED += [("multiprocessing_distributed", 4, 4 * 89)]


@pytest.mark.parametrize("name, world_size, batch", EVALUATED)
def test_evaluate_finds_what_was_recorded(
    trained, digits, tmp_path, name, world_size, batch
):
    """Any number of processes finds the recorded metrics, without training images, with more keys."""
    record, file = records(trained)[-1], tmp_path / "with_ema.pt"
    content = checkpoint(trained)
    ema = {key: torch.zeros_like(value) for key, value in content["state_dict"].items()}
    torch.save({**content, "ema": ema}, file)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "val").symlink_to(digits / "val")
    flags = ["--data", tmp_path / "data", "--image-size", 32, "--precision", "fp32"]
    flags += ["-b", batch, "-j", 0, "--evaluate", "--resume", file]
    flags += ["--output", tmp_path / "none"]
    with Ranks(tmp_path, world_size, train, name=name, flags=flags) as ranks:
        assert not any(ranks.end(180)), ranks.text()
        line = "val loss {val_loss:.4g}, top-1 {val_top1:.2f} %, top-5 {val_top5:.2f} %"
        line = line.format(**record) + ", 359 images"
        assert ranks.log(0).splitlines()[-1] == line
        assert not any(ranks.log(rank) for rank in range(1, world_size))
    assert not (tmp_path / "none").exists()


def test_validation_records_no_gradients(monkeypatch):
    """A graph for every batch would need memory, and the DDP model would average gradients."""
    seen = []

    class Probe(torch.nn.Linear):
        def forward(self, images):
            seen.append((torch.is_grad_enabled(), self.training))
            return super().forward(images)

    monkeypatch.setattr(distributed, "all_reduce", lambda sums: sums)
    batches = [(torch.rand(2, 4), torch.tensor([0, 1]))] * 2
    loader, args = Batches(batches), Namespace(precision="fp32")
    assert distributed.validate(args, loader, Probe(4, 6))["images"] == 4
    assert seen == [(False, False)] * 2


def test_another_script_reads_the_checkpoint(trained):
    """The other script expects the keys of the ImageNet example in pytorch/examples."""
    content, model = checkpoint(trained), resnet18(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
    assert (content["arch"], content["epoch"]) == ("resnet18", 2)
    assert 0 <= content["best_acc1"].to("cpu").item() <= 100
    model.load_state_dict(content["state_dict"])
    optimizer.load_state_dict(content["optimizer"])
    schedule.load_state_dict(content["scheduler"])


def test_a_compiled_network_and_synthetic_images(tmp_path):
    flags = ["--synthetic", 64, "-b", 8, "--image-size", 32, "--epochs", 1]
    flags += ["--max-steps", 3, "--compile", "--output", tmp_path / "out"]
    name = "multiprocessing_distributed"
    how = {"name": name, "flags": flags, "net": "flat"}
    (graphs,) = run_ranks(tmp_path, 1, train_compiled, **how)
    assert graphs >= 1
    assert records(tmp_path / "out")[0]["images"] == 24


def test_quickstart_draws(trained, tmp_path, monkeypatch, capsys):
    for name in quickstart.LAUNCHERS:
        shutil.copytree(trained, tmp_path / name)
    monkeypatch.setattr(quickstart, "train", lambda *_: "done")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["quickstart", "data", tmp_path])
    with pytest.raises(SystemExit, match="False"):
        quickstart.main()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"{tmp_path}/curves.png shows the losses and accuracies of all runs."
    assert (tmp_path / "curves.png").exists()


def test_an_unreadable_image_is_one_line_of_the_process_that_reads_it(
    pictures, tmp_path
):
    """The process prints one line; the others' tracebacks report that the connection was lost."""
    broken = pictures / "train" / "dog" / "3.JPEG"
    broken.write_bytes(broken.read_bytes()[:200])
    flags = ["--data", pictures, *TINY, "-b", 16, "-j", 1, "--output", tmp_path / "out"]
    with Ranks(tmp_path, 2, train, name="distributed", flags=flags) as ranks:
        assert sorted(ranks.end()) == [1, 2], ranks.text()
        line = ranks.log(ranks.end().index(2)).splitlines()[-1]
        assert line.startswith("distributed.py: error: ") and str(broken) in line
        assert ranks.text().count(str(broken)) == 1
