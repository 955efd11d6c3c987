"""One training run, five ways: the same images, the same weights, the same figures."""

import json
import os
import sys
from functools import cache

import pytest
import torch
from conftest import ROOT, run
from played import free_port
from ranks import recorded, results, run_ranks, small

FLAGS = "--image-size 32 --precision fp32 --min-crop 0.5 --print-interval 4".split()
HOROVOD = "horovod_distributed"


def horovod_ranks(folder, world_size, task, seconds=180, **arguments):
    """run_ranks for Horovod, whose processes horovodrun has to start."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = json.dumps({"folder": str(folder), **arguments}, default=str)
    command = ("horovodrun", "-np", world_size, "-H", f"localhost:{world_size}")
    probe = (sys.executable, ROOT / "tests" / "ranks.py", task.__name__, arguments)
    path = f"{ROOT}:{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}"
    variables = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    ended = run(*command, "--gloo", *probe, timeout=seconds, **variables)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return results(folder)


def start(name):
    return horovod_ranks if name == HOROVOD else run_ranks


# --- the same images, the same weights ---

# Where a bound comes from: a gradient is a sum, and every way to split the batch adds it
# up in another order. A float32 sum of terms whose absolute values add up to A is off by at
# most about eps * A a level of the addition tree; A is a few times the gradient here. SGD adds
# up lr / (1 - momentum) * steps of it. Learning rate at most 0.1 * 48 / 256, momentum 0.9,
# 20 steps, gradients below 1 (asserted), 4 levels.
EPS = torch.finfo(torch.float32).eps
STEPS, RATE, MOMENTUM, LEVELS = 20, 0.1 * 48 / 256, 0.9, 4
MOMENTUM_BOUND = LEVELS * EPS / (1 - MOMENTUM)
WEIGHT_BOUND = STEPS * RATE * MOMENTUM_BOUND


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    """What each process of a run came to, with `workers` loader processes for each."""

    @cache
    def of(name, world_size, workers):
        folder = tmp_path_factory.mktemp("trained")
        flags = ["--data", digits, *FLAGS, "-b", 48, "--max-steps", 10, "--epochs", 2]
        flags += ["--lr", 0.1, "--warmup-epochs", 1, "--output", folder / "out"]
        runs = [("small", [*flags, "-j", workers], None, free_port())]
        found = start(name)(folder, world_size, recorded, name=name, runs=runs)
        assert len(found) == world_size
        return [rank for (rank,) in found]

    return of


@pytest.mark.parametrize(
    "name, world_size, workers",
    [
        ("dataparallel", 1, 2),
        ("distributed", 2, 1),
        ("distributed", 3, 0),
        ("multiprocessing_distributed", 4, 1),
        pytest.param(HOROVOD, 3, 1, marks=[pytest.mark.horovod, pytest.mark.full]),
    ],
)
def test_same_images_and_weights(trained, name, world_size, workers, record_property):
    """Pixels and labels of each step, over two epochs of persistent loader processes.

    Weights and momenta up to rounding; one process has the very bits.
    """
    processes = trained(name, world_size, workers)
    (whole,) = trained("dataparallel", 1, 0)
    for *shards, (epoch, images) in zip(
        *(rank["steps"] for rank in processes), whole["steps"], strict=True
    ):
        assert all(len(own) == 48 // world_size for _, own in shards)
        assert {one for one, _ in shards} == {epoch}
        assert sorted(sum((own for _, own in shards), [])) == sorted(images)
    assert len({image for _, images in whole["steps"] for image in images}) == 20 * 48
    weights, momenta = (
        max((a - b).abs().max().item() for a, b in zip(*pair, strict=True))
        for pair in (
            (processes[0]["weights"].values(), whole["weights"].values()),
            (processes[0]["momenta"], whole["momenta"]),
        )
    )
    row = f"rounding / {name}, {world_size} processes"
    record_property(f"{row} / weights", weights)
    record_property(f"{row} / momentum", momenta)
    one = world_size == 1
    assert weights <= (0 if one else WEIGHT_BOUND)
    assert momenta <= (0 if one else MOMENTUM_BOUND)
    assert whole["losses"][1] < whole["losses"][0] < 2.4
    largest = max(momentum.abs().max().item() for momentum in whole["momenta"])
    assert 0.01 < largest < 1 / (1 - MOMENTUM)


# --- micro-batches, and half the bytes ---


@pytest.mark.parametrize(
    "name", ["distributed", pytest.param(HOROVOD, marks=pytest.mark.horovod)]
)
def test_a_step_sends_its_gradients_once(tmp_path, digits, name):
    """In four bytes a weight, or two, however many micro-batches there are."""
    flags = ["--data", digits, *FLAGS, "-b", 48, "--max-steps", 2, "--epochs", 1]
    more = [[], ["--accumulate", 4]]
    more.append(["--compress-gradients", "fp16", "--accumulate", 2])
    if name != HOROVOD:  # which has fp16 alone
        more.append(["--compress-gradients", "bf16"])
    runs = []
    for number, others in enumerate(more):
        own = [*flags, *others, "-j", 0, "--output", tmp_path / str(number)]
        runs.append(("small", list(map(str, own)), None, free_port()))
    options = {"name": name, "runs": runs, "counted": True}
    ranks = start(name)(tmp_path, 2, recorded, **options)
    whole, parts, *halves = ranks[0]
    assert [run["sent"] for run in ranks[0]] == [run["sent"] for run in ranks[1]]
    assert sum(whole["sent"]) == 2 * 4 * sum(w.numel() for w in small(10).parameters())
    assert parts["sent"] == whole["sent"]
    for half in halves:
        assert half["sent"] == [size // 2 for size in whole["sent"]]
    torch.manual_seed(0)
    ends = small(10).state_dict(), *(run["weights"] for run in ranks[0])
    first, whole, parts, *halves = (
        torch.cat([weight.flatten() for weight in end.values()]) for end in ends
    )
    moved = (whole - first).abs().max()
    assert 0 < (parts - whole).abs().max() < 1e-4 * moved
    for half in halves:  # bf16 has 8 bits
        assert 0 < (half - whole).abs().max() < 0.05 * moved
