"""One training run, five ways: the same images, the same weights, the same figures."""

import json
import os
import sys
from argparse import Namespace
from functools import cache

import pytest
import reference
import torch
from conftest import ROOT, run
from played import free_port
from ranks import norm, recorded, results, run_ranks, small
from torch.nn.functional import cross_entropy

FLAGS = "--image-size 32 --precision fp32 --min-crop 0.5 --print-interval 4".split()
HOROVOD = "horovod_distributed"


def horovod_ranks(folder, world_size, task, seconds=180, **arguments):
    """run_ranks for Horovod, whose processes horovodrun has to start."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = json.dumps({"folder": str(folder), **arguments}, default=str)
    command = ("horovodrun", "-np", world_size, "-H", f"localhost:{world_size}")
    probe = (sys.executable, ROOT / "tests" / "ranks.py", task.__name__, arguments)
    variables = {"CUDA_VISIBLE_DEVICES": ""}
    variables["PYTHONPATH"] = (
        f"{ROOT}:{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}"
    )
    ended = run(*command, "--gloo", *probe, timeout=seconds, **variables)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return results(folder)


def start(name):
    return horovod_ranks if name == HOROVOD else run_ranks


def cases(*rows):
    """Parameters, of which the first is a script's name."""
    marks = {HOROVOD: [pytest.mark.horovod, pytest.mark.full]}
    return [pytest.param(*row, marks=marks.get(row[0], ())) for row in rows]


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
    cases(
        ("dataparallel", 1, 2),
        ("distributed", 2, 1),
        ("distributed", 3, 0),
        ("multiprocessing_distributed", 4, 1),
        (HOROVOD, 3, 1),
    ),
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


# --- the same validation ---


@pytest.fixture(scope="module")
def of_sizes(digits, tmp_path_factory):
    """Data sets with 10 to 37 validation images, of all classes."""
    folder, files = tmp_path_factory.mktemp("sizes"), {}
    for file, label in reference.listing(digits / "val"):
        files.setdefault(label, []).append(file)
    turns = [file for turn in zip(*files.values()) for file in turn]  # noqa: B905
    for size in (10, 13, 24, 37):
        for file in turns[:size]:
            copy = folder / str(size) / "val" / file.parent.name / file.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(file)
        (folder / str(size) / "train").symlink_to(digits / "train")
    return sorted(folder.iterdir())


@pytest.mark.parametrize(
    "name, world_size",
    cases(
        ("dataparallel", 1),
        ("distributed", 3),
        ("multiprocessing_distributed", 4),
        (HOROVOD, 3),
    ),
)
def test_validation_counts_every_image_once(
    of_sizes, tmp_path, name, world_size, record_property
):
    """What all processes found is what the saved file scores, image by image."""
    runs = []
    for data in of_sizes:
        flags = ["--data", data, *FLAGS, "-b", 12, "-j", 0, "--epochs", 1]
        flags += ["--max-steps", 1, "--output", tmp_path / data.name]
        runs.append(("norm", flags, None, free_port()))
    found = start(name)(tmp_path, world_size, recorded, name=name, runs=runs)
    assert len(found) == world_size
    errors, hits = [], set()
    for data, *processes in zip(of_sizes, *found, strict=True):
        record = json.loads((tmp_path / data.name / "epochs.jsonl").read_text())
        path = tmp_path / data.name / "checkpoint.pt"
        weights = torch.load(path, weights_only=True)["state_dict"]
        for process in processes:  # also batch norm's statistics
            assert all(torch.equal(process["weights"][n], weights[n]) for n in weights)
        size, (loss, top1, top5) = int(data.name), score(data / "val", weights)
        counted = record["val_images"], record["val_top1"], record["val_top5"]
        assert counted == (size, 100 * top1 / size, 100 * top5 / size)
        errors.append(abs(record["val_loss"] - loss))
        hits.add((top1, top5))
    row = f"val loss / {name}, {world_size} processes / batch 12"
    record_property(row, max(errors))
    assert max(errors) <= 1e-5
    assert len(hits) > 2  # or equal counts would say little


def score(folder, weights):
    """Loss and hits of one process, in plain PyTorch, one image after the other."""
    recipe = Namespace(decoder="torchcodec", image_size=32)
    model = norm(10).eval()
    model.load_state_dict(weights)
    loss = top1 = top5 = 0
    for file, label in (images := reference.listing(folder)):
        with torch.no_grad():
            outputs = model(reference.picture(recipe, file, None).unsqueeze(0))
        loss += cross_entropy(outputs, torch.tensor([label])).item() / len(images)
        best = outputs[0].topk(5).indices.tolist()
        top1 += best[0] == label
        top5 += label in best
    return loss, top1, top5
