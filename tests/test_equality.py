"""One training run, five ways: the same images, the same weights, the same figures."""

import functools
import json
import os
import sys
from argparse import Namespace
from itertools import product

import pytest
import reference
import torch
from conftest import ROOT, run
from ranks import NormNet, batches, chosen, results, run_ranks, train, validate_sizes
from torch.nn.functional import cross_entropy

FLAGS = "--image-size 32 --precision fp32 --min-crop 0.5 --print-interval 4".split()


def horovod_ranks(folder, world_size, task, seconds=180, **arguments):
    """run_ranks for Horovod, whose processes horovodrun has to start."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = json.dumps({"folder": str(folder), **arguments}, default=str)
    command = ("horovodrun", "-np", world_size, "-H", f"localhost:{world_size}")
    probe = (sys.executable, ROOT / "tests" / "ranks.py", task.__name__, arguments)
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    ended = run(*command, "--gloo", *probe, timeout=seconds, PYTHONPATH=path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return results(folder)


def start(name):
    return horovod_ranks if name == "horovod_distributed" else run_ranks


def cases(short, *numbers):
    """Scripts at 1 to 4 processes, and more numbers; without --full those in `short`.

    Horovod and, at two processes, mp.spawn are in test_reference.py too.
    """
    found = []
    for name, few in short.items():
        needs = [pytest.mark.horovod] if name == "horovod_distributed" else []
        every = product((1, 2, 3, 4), *numbers)
        for case in few if name == "dataparallel" else every:
            marks = needs + [pytest.mark.full] * (case not in few)
            found.append(pytest.param(name, *case, marks=marks))
    return found


# --- the same images ---

LOADERS = {  # processes, and loader processes of each
    "dataparallel": [(1, 1)],
    "distributed": [(1, 3), (2, 1), (3, 0)],
    "multiprocessing_distributed": [(4, 1)],
    "horovod_distributed": [],
}


@pytest.fixture(scope="module")
def digests(digits, tmp_path_factory):
    """Global batches of a run: [(epoch, the digests of its pixels and labels), ...]."""

    def of(name, world_size, workers, *flags):
        """`workers` loader processes for each training process."""
        folder = tmp_path_factory.mktemp("batches")
        argv = ["--data", digits, *FLAGS, "-b", 48, "--max-steps", 4, "--epochs", 2]
        argv += ["--output", folder / "out", "-j", workers * world_size, *flags]
        arguments = {"name": name, "flags": list(map(str, argv)), "net": "small"}
        shards = start(name)(folder, world_size, batches, **arguments)
        assert len(shards) == world_size
        steps = []
        for parts in zip(*shards, strict=True):
            assert {len(images) for _, images in parts} == {48 // world_size}
            assert len({epoch for epoch, _ in parts}) == 1
            steps.append((parts[0][0], sorted(sum((part[1] for part in parts), []))))
        return steps

    return of


@pytest.fixture(scope="module")
def one_process(digests):
    """What one process without loader processes trains on."""
    steps = digests("dataparallel", 1, 0)
    assert [epoch for epoch, _ in steps] == [0] * 4 + [1] * 4
    assert len({digest for _, images in steps for digest in images}) == 8 * 48
    return steps


@pytest.mark.parametrize("name, world_size, workers", cases(LOADERS, (0, 1, 3)))
def test_every_step_has_the_same_images(
    digests, one_process, name, world_size, workers
):
    """Pixels and labels, after augmentation, over two epochs of persistent workers."""
    assert digests(name, world_size, workers) == one_process


# --- the same weights ---


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    """Train 20 steps, once; returns the checkpoint."""

    @functools.cache
    def of(name, world_size):
        folder = tmp_path_factory.mktemp("weights")
        argv = ["--data", digits, *FLAGS, "-b", 48, "--max-steps", 10, "--epochs", 2]
        argv += ["--lr", 0.1, "--warmup-epochs", 1, "-j", 0, "--output", folder / "out"]
        arguments = {"name": name, "flags": list(map(str, argv)), "net": "small"}
        start(name)(folder, world_size, train, **arguments)
        return torch.load(folder / "out" / "checkpoint.pt", weights_only=True)

    return of


@pytest.fixture(scope="module")
def whole_batch(trained):
    """dataparallel, which sees the whole batch in one process."""
    return trained("dataparallel", 1)


def difference(one, other):
    """Largest difference of a weight, and of a momentum."""
    numbers = []
    for content in (one, other):
        momenta = content["optimizer"]["state"].values()
        momenta = [state["momentum_buffer"].flatten() for state in momenta]
        weights = [weight.flatten() for weight in content["state_dict"].values()]
        numbers.append((torch.cat(weights), torch.cat(momenta)))
    return tuple((a - b).abs().max().item() for a, b in zip(*numbers, strict=True))


# Where a bound comes from: a gradient is a sum, and every way to split the batch adds it
# up in another order. A float32 sum of terms whose absolute values add up to A is off by at
# most about eps * A a level of the addition tree; A is a few times the gradient here. SGD adds
# up lr / (1 - momentum) * steps of it. Learning rate at most 0.1 * 48 / 256, momentum 0.9,
# 20 steps, gradients below 1 (asserted), 4 levels.
EPS = torch.finfo(torch.float32).eps
STEPS, RATE, MOMENTUM, LEVELS = 20, 0.1 * 48 / 256, 0.9, 4
MOMENTUM_BOUND = LEVELS * EPS / (1 - MOMENTUM)
WEIGHT_BOUND = STEPS * RATE * MOMENTUM_BOUND


TRAINED = {
    "distributed": [(1,), (2,), (3,), (4,)],
    "multiprocessing_distributed": [],
    "horovod_distributed": [],
}


@pytest.mark.parametrize("name, world_size", cases(TRAINED))
def test_same_weights_up_to_rounding(trained, whole_batch, name, world_size, figure):
    """Of a run that is stable and learns; one process has the very bits."""
    found = trained(name, world_size)
    weights, momenta = difference(found, whole_batch)
    row = f"rounding / {name}, {world_size} processes"
    figure(f"{row} / weights", weights)
    figure(f"{row} / momentum", momenta)
    assert weights <= WEIGHT_BOUND * (world_size > 1), weights
    assert momenta <= MOMENTUM_BOUND * (world_size > 1), momenta
    for one, other in zip(found["records"], whole_batch["records"], strict=True):
        for key in ("train_loss", "val_loss", "images", "val_images"):
            assert one[key] == pytest.approx(other[key], abs=1e-5)
    losses = [record["train_loss"] for record in found["records"]]
    assert losses[1] < losses[0] < 2.4
    states = found["optimizer"]["state"].values()
    largest = max(state["momentum_buffer"].abs().max().item() for state in states)
    assert 0.01 < largest < 1 / (1 - MOMENTUM)


# --- the same validation ---

VALIDATED = {
    "dataparallel": [(1,)],
    "distributed": [(2,), (3,)],
    "multiprocessing_distributed": [(4,)],
    "horovod_distributed": [],
}


@pytest.mark.parametrize("name, world_size", cases(VALIDATED))
def test_validation_counts_every_image_once(digits, tmp_path, name, world_size, figure):
    """On up to 41 images: what all processes found is what the saved file scores."""
    sizes = list(range(world_size, 42))
    flags = ["--data", digits, *FLAGS, "-b", 12, "-j", 0, "--epochs", 1]
    flags += ["--max-steps", 1, "--output", tmp_path / "out"]
    arguments = {"name": name, "flags": list(map(str, flags)), "sizes": sizes}
    arguments["output"] = str(tmp_path)
    found = start(name)(tmp_path, world_size, validate_sizes, **arguments)
    assert len(found) == world_size and all(list(one) == sizes for one in found)
    errors, hits = [], set()
    for size in sizes:
        loss, top1, top5 = score(digits, tmp_path / f"{size}.pt", size)
        right = {"top1": 100 * top1 / size, "top5": 100 * top5 / size, "images": size}
        for figures, buffers in (rank[size] for rank in found):
            errors.append(abs(figures["loss"] - loss))
            assert {name: figures[name] for name in right} == right
            for one, buffer in rank_0_buffers(size).items():
                assert torch.equal(buffer, buffers[one])
        hits.add((top1, top5))
    figure(f"val loss / {name}, {world_size} processes / batch 12", max(errors))
    assert max(errors) <= 1e-5
    assert len(hits) > 10  # or equal counts would say little


def rank_0_buffers(size):
    """What validate_sizes() put into the batch norm of rank 0 alone."""
    generator = torch.Generator().manual_seed(1000 * size)
    norm = NormNet(10)[1]
    norm.running_mean.normal_(generator=generator)
    norm.running_var.uniform_(0.5, 2, generator=generator)
    return {"1.running_mean": norm.running_mean, "1.running_var": norm.running_var}


def score(digits, path, size):
    """Loss and hits of one process, in plain PyTorch, one image after the other."""
    model = NormNet(10).eval()
    model.load_state_dict(torch.load(path, weights_only=True))
    loss = top1 = top5 = 0
    for index in chosen(359, size):
        image, label = val_image(digits, index)
        with torch.no_grad():
            outputs = model(image.unsqueeze(0))
        loss += cross_entropy(outputs, torch.tensor([label])).item() / size
        best = outputs[0].topk(5).indices.tolist()
        top1 += best[0] == label
        top5 += label in best
    return loss, top1, top5


@functools.cache
def val_image(digits, index):
    """One image as the network takes it, and its label."""
    file, label = reference.listing(digits / "val")[index]
    recipe = Namespace(decoder="torchvision", image_size=32)
    return reference.picture(recipe, file, None), label
