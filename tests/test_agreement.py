"""Processes that were started unlike end immediately, and one line tells why."""

import shutil
from argparse import Namespace
from unittest.mock import patch

import pytest
import torch
from conftest import TINY
from ranks import Ranks, parse, train_unlike

from common.data import build_datasets
from common.errors import UserError
from launch.agreement import agree, check_batch

EPOCH = [*TINY, "--epochs", "1", "--max-steps", "2", "-j", "0"]


class Device(str):
    """The CPU, whatever its `type` is."""


def difference(*flags, device="cpu", version=torch.__version__):
    """What agree() raises in processes with these flags; the last one is special."""
    started = []
    for own in flags:
        args = parse(*EPOCH, *own, strategy="distributed")
        started.append((args, "cpu", torch.__version__, build_datasets(args)))
    started[-1] = (started[-1][0], device, version, started[-1][3])
    tables, errors = [], []

    def collect(table):
        tables.append(table)
        return torch.zeros_like(table)

    for all_reduce in (collect, lambda _: sum(tables)):
        for rank, (args, kind, torch_version, datasets) in enumerate(started):
            with patch.object(torch, "__version__", torch_version):
                on = Device("cpu")
                on.type = kind
                try:
                    agree(args, rank, len(flags), on, all_reduce, datasets)
                except UserError as error:
                    errors.append(str(error))
    assert len(errors) % len(flags) == 0 and len(set(errors)) < 2
    return errors[0] if errors else None


def line(facts, rank=1):
    return f"rank {rank} differs from rank 0 in {facts}; all processes need the same settings"


DATA = ("--synthetic", 8)


def test_other_flags():
    for flags, facts in (
        (("--lr", "0.2"), "--lr"),
        (("--seed", "1"), "--seed"),
        (("--print-interval", "2"), "--print-interval"),
        (("--decoder", "pil"), "--decoder"),
        (("--evaluate", "--pretrained"), "--pretrained, --evaluate"),
        (("--synthetic", 9), "--synthetic, the training images"),
    ):
        assert difference(DATA, (*DATA, *flags)) == line(facts)


def test_other_devices_and_versions():
    assert difference(DATA, DATA) is None
    assert difference(DATA, DATA, device="cuda") == line("--device")
    assert difference(DATA, DATA, version="1.0") == line("PyTorch's version")


@pytest.mark.torchcodec
def test_images_of_another_machine(pictures, tmp_path):
    """Folders, loader processes and waiting times may differ."""
    there = shutil.copytree(pictures, tmp_path / "there")
    own = ("--data", there, "--output", there / "out", "-j", 2)
    own += ("--decoder", "torchcodec", "--timeout-seconds", 50)
    here = ("--data", pictures, "--output", tmp_path / "out")
    assert difference(here, own) is None
    (there / "val" / "dog" / "2.JPEG").unlink()
    assert difference(here, own) == line("the validation images")
    shutil.copy(pictures / "val" / "dog" / "2.JPEG", there / "val" / "dog")
    (there / "train" / "cat" / "7.JPEG").rename(there / "train" / "dog" / "8.JPEG")
    assert difference(here, own) == line("the training images")


NEEDED = ("state_dict", "best_acc1", "learning_rate", "recipe", "images", "step")


def test_checkpoints_of_another_machine(tmp_path):
    content = dict.fromkeys(NEEDED, 0)
    for name, loss in (("a", 1.0), ("b", 2.0), ("again", 1.0)):
        (tmp_path / name).mkdir()
        moment = {**content, "epoch": 1, "sums": {"loss": loss}, "records": []}
        torch.save(moment, tmp_path / name / "checkpoint.pt")

    def resumed(*names):
        flags = (*DATA, "--resume", "auto", "--output")
        return difference(*((*flags, tmp_path / name) for name in names))

    assert resumed("a", "again") is None
    assert resumed("a", "b") == resumed("a", "none") == line("the checkpoint")


@pytest.mark.parametrize(
    "batch, processes, nearest", ((63, 2, 64), (10, 4, 8), (1, 4, 4), (100, 3, 99))
)
def test_a_batch_that_cannot_be_divided_is_refused(batch, processes, nearest):
    check_batch(Namespace(global_batch_size=nearest, accumulate=1), processes)
    for parts in {1, processes}:
        args = Namespace(global_batch_size=batch, accumulate=parts)
        with pytest.raises(UserError, match=f"the nearest size that can is {nearest}$"):
            check_batch(args, processes // parts)


def test_each_process_has_to_have_an_image_to_validate(pictures):
    for part in ("cat", "dog"):
        for image in list((pictures / "val" / part).iterdir())[1:]:
            image.unlink()
    flags = ("--data", pictures)
    assert difference(flags, flags) is None
    expected = "2 validation images are too few for 4 processes"
    assert expected in difference(*[flags] * 4)


@pytest.mark.parametrize("name", ("distributed", "multiprocessing_distributed"))
def test_processes_that_are_started_unlike(name, pictures, tmp_path):
    """All end, before anything is written, and one line is printed."""
    own = [["--data", pictures, "--output", tmp_path / "out"]] * 3
    own[2] = [*own[2], "--lr", "0.2"]
    flags = [*EPOCH, "-b", 6]
    with Ranks(tmp_path, 3, train_unlike, name=name, flags=flags, own=own) as ranks:
        assert ranks.end(45) == [2] * 3, ranks.text()
        errors = [text for text in ranks.text().splitlines() if "error" in text]
    assert errors == [f"{name}.py: error: {line('--lr', rank=2)}"]
    assert not (tmp_path / "out" / "checkpoint.pt").exists()
