"""Every strategy on a GPU, compared with the same training on the CPU: pytest -m gpu tests/gpu.

The CPU's is distributed.py's, which tests/test_reference.py holds to plain PyTorch. Rows
are in the order of their importance; those with 2 processes need two GPUs. --rehearse-gpu
runs on the CPU what can run there, at a smaller size. scripts/gpu_check.sh runs the rows
on a machine without more than PyTorch and pytest.
"""

import functools
import json
import math
import os
import subprocess
import time
from argparse import Namespace

import pytest
import torch
from conftest import ROOT, launcher
from ranks import train_watched
from test_equality import start

from benchmarks.photographs import write_photographs

LIMIT = 100  # seconds for the processes of a run
RESERVE = 40  # seconds in which a row could not do anything
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(6 * LIMIT)]

# Largest difference of a loss between two runs that should be one, in the mean over the
# first epoch's STEPS steps. On a CPU, at learning rate 0.001, two memory formats in fp32
# were 3e-5 apart, bf16 was 0.002 from fp32, twice the learning rate 0.0012, and images that
# were normalized twice 0.002. O3 was nowhere measured: its fp16 weights lose small updates.
LOSS_TOLERANCE = {"fp32": 3e-4, "bf16": 0.02, "fp16": 3e-3, "O3": 0.05}
# Of momenta and batch norm's statistics after a resume, relative to their norm, at
# learning rate 0, where nothing grows. Momenta that begin at zero are 0.9 ** 8 = 0.43 off.
STATE_TOLERANCE = {"fp32": 0.01, "bf16": 0.2, "fp16": 0.1}
# Of a pixel on its way to the network: float32 rounds two operations on values below
# 2.7 (a few times 1.2e-7); fp16, in which O2 and O3 hand them on, has steps of 2**-9 there.
EXACT, HALF = 1e-6, 2**-10 + 1e-6

EPOCHS, STEPS, BATCH, IMAGES = 4, 4, 16, 64
RECIPE = f"-b {BATCH} --epochs {EPOCHS} --max-steps {STEPS} --lr 0.001 --decoder pil"
RECIPE += f" --warmup-epochs 0 --print-interval {STEPS} --workers 2"
COMPUTES = {"O0": "fp32", "O1": "fp16", "O2": "fp16"}
DDP, SPAWNED, REPLICAS = "distributed", "multiprocessing_distributed", "dataparallel"
APEX, HOROVOD = "apex_distributed", "horovod_distributed"
MARKS = {APEX: pytest.mark.apex, HOROVOD: pytest.mark.horovod}


def rows(*listed):
    """Parametrize a test: its rows are a strategy and other words, such as DDP + " 1 fp16"."""
    found = []
    for words in map(str.split, listed):
        values = [int(word) if word.isdigit() else word for word in words]
        marks = MARKS.get(words[0], ())
        found.append(pytest.param(*values, marks=marks, id="-".join(words)))
    names = ("strategy", "processes", "precision")
    return pytest.mark.parametrize(names[: len(words)], found)


@pytest.fixture(scope="session")
def here(pytestconfig):
    """What rows compute on."""
    if pytestconfig.getoption("rehearse_gpu"):
        return Namespace(gpus=[], size=32)
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    gpus = chosen.split(",") if chosen else map(str, range(count))
    return Namespace(gpus=list(gpus), size=64)


def seconds():
    """How long processes may take, of what scripts/gpu_check.sh leaves of its time."""
    return min(LIMIT, float(os.environ.get("GPU_CHECK_UNTIL", "inf")) - time.time())


@pytest.fixture(autouse=True)
def enough_time():
    """Otherwise the row ends in an error, so that --last-failed runs it."""
    if seconds() < RESERVE:
        pytest.fail("not run: time is up", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def commit(record_testsuite_property):
    head = subprocess.run("git rev-parse HEAD".split(), cwd=ROOT, capture_output=True)
    record_testsuite_property("commit", head.stdout.decode().strip())


@pytest.fixture(scope="session")
def photographs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photographs")
    write_photographs(folder, train=IMAGES, val=IMAGES // 4, classes=8)
    return folder


def flags_of(here, data, output, *flags):
    """The command line of a run."""
    argv = ["--data", data, *RECIPE.split(), "--image-size", here.size]
    return [str(flag) for flag in (*argv, "--output", output, *flags)]


@pytest.fixture
def train(here, photographs, tmp_path):
    """Train by one of the scripts; returns what it came to. Skips what cannot be had."""

    def run(strategy, processes, precision, *flags, net=None, output="run"):
        if 0 < len(here.gpus) < processes:
            pytest.skip("one GPU: NCCL and nn.DataParallel's replicas want one each")
        if not here.gpus and strategy == REPLICAS and processes > 1:
            pytest.skip("a CPU: no replicas")
        name = "--opt-level" if precision[0] == "O" else "--precision"
        argv = flags_of(here, photographs, tmp_path / output, name, precision, *flags)
        number = 1 if strategy == REPLICAS else processes
        gpus = ",".join(here.gpus[:processes])
        arguments = {"name": strategy, "flags": argv, "net": net, "skipped": 0}
        returned = start(strategy)(
            tmp_path / f"{output} of processes",
            *(number, train_watched),
            **{"seconds": seconds(), "gpus": gpus, **arguments},
        )
        found = came_to(tmp_path / output, returned)
        recipe = found.content["recipe"]
        assert recipe["opt_level" if precision[0] == "O" else "precision"] == precision
        return found

    return run


def came_to(output, returned=None):
    """What a run left in its output folder."""
    records = [json.loads(line) for line in open(output / "epochs.jsonl")]
    content = torch.load(output / "checkpoint.pt", "cpu", weights_only=True)
    scale = content.get("amp", {}).get("loss_scaler0") or content["scaler"]
    factor = scale.get("scale", scale.get("loss_scale", 0))
    return Namespace(
        losses=[record["train_loss"] for record in records],
        content=content,
        scale=scale,
        skipped=round(math.log2(2**16 / factor)) if factor > 1 else 0,
        returned=returned,
    )


@pytest.fixture(scope="session")
def on_the_cpu(here, photographs, tmp_path_factory):
    """The same training in fp32, of which the first steps are skipped as in a run."""

    @functools.cache
    def of(processes, skipped=0, net=None, *flags):
        output = tmp_path_factory.mktemp("cpu") / "run"
        flags = flags_of(here, photographs, output, "--precision", "fp32", *flags)
        arguments = {"name": DDP, "flags": flags, "net": net, "skipped": skipped}
        returned = start(DDP)(
            output.with_name("processes"),
            *(processes, train_watched),
            **{"seconds": seconds(), "gpus": "", **arguments},
        )
        return came_to(output, returned)

    return of


def difference(found, right, epochs=1):
    """Between training losses; infinite where one is no number."""
    assert len(found.losses) == len(right.losses) == EPOCHS
    pairs = zip(found.losses[:epochs], right.losses, strict=False)
    values = [abs(one - other) for one, other in pairs]
    return max(math.inf if math.isnan(value) else value for value in values)


def tolerance(precision):
    return LOSS_TOLERANCE[COMPUTES.get(precision, precision)]


def pixels_differ(found, right):
    """By how much, in what the first convolutions of all processes got."""
    pairs = [
        pair
        for ranks in zip(found.returned, right.returned, strict=True)
        for pair in zip(*ranks, strict=True)
    ]
    assert len(pairs) == STEPS * len(found.returned)
    return max((one - other).abs().max().item() for one, other in pairs)


TRAININGS = [f"{DDP} 1 {precision}" for precision in ("fp32", "bf16", "fp16")]
TRAININGS += [f"{APEX} 1 {level}" for level in ("O0", "O1", "O2", "O3")]
TRAININGS += [f"{HOROVOD} 1 fp32", f"{HOROVOD} 1 fp16", f"{REPLICAS} 1 bf16"]
TRAININGS += [f"{REPLICAS} 1 fp16", f"{SPAWNED} 1 bf16", f"{DDP} 2 fp32"]
TRAININGS += [f"{HOROVOD} 2 bf16", f"{APEX} 2 O1", f"{REPLICAS} 2 fp32"]


@rows(*TRAININGS)
def test_it_trains_as_the_cpu_does(
    train, on_the_cpu, record_property, strategy, processes, precision
):
    """The pixels that reach the network, and the loss."""
    found = train(strategy, processes, precision)
    right = on_the_cpu(processes, found.skipped)
    record_property("skipped steps", found.skipped)
    record_property("loss", [right.losses[0], *found.losses])
    if (strategy, processes) == (REPLICAS, 2):  # their shards are others
        assert all(map(math.isfinite, found.losses))
        return
    pixels, loss = pixels_differ(found, right), difference(found, right)
    record_property("pixels differ by", pixels)
    record_property("loss differs by", loss)
    assert pixels <= (HALF if precision in ("O2", "O3") else EXACT)
    assert loss <= tolerance(precision)


def states_differ(one, other):
    """Largest difference of weights; the norm of the difference of other tensors over theirs."""

    def tensors(content):
        model, state = content["state_dict"], content["optimizer"]["state"]
        return {
            "weights": [model[name] for name in model if "running_" not in name],
            "masters": list(content.get("masters", {}).values()),
            "momenta": [part["momentum_buffer"] for part in state.values()],
            "statistics": [model[name] for name in model if "running_" in name],
        }

    one, other = tensors(one), tensors(other)
    found = {}
    for name in filter(one.get, one):
        a, b = (
            torch.cat([part.double().flatten() for part in side[name]])
            for side in (one, other)
        )
        exact = name in ("weights", "masters")
        change = (a - b).abs().max() if exact else (a - b).norm() / a.norm()
        found[name] = change.item()
    return found


@rows(
    *(f"{DDP} 1 fp16", f"{APEX} 1 O1", f"{APEX} 1 O2", f"{HOROVOD} 1 fp16"),
    *(f"{REPLICAS} 1 bf16", f"{SPAWNED} 1 fp32", f"{DDP} 2 bf16"),
)
def test_it_resumes(train, record_property, strategy, processes, precision):
    """In one piece and in two. At learning rate 0 the weights stay, so that rounding does
    not grow; gradients go into momenta, images into losses and batch norm's statistics."""
    how = (strategy, processes, precision, "--lr", 0)
    whole = train(*how, output="whole")
    train(*how, "--epochs", EPOCHS // 2, output="parts")
    parts = train(*how, "--resume", output="parts")
    loss = difference(whole, parts, EPOCHS)
    record_property("loss differs by", loss)
    assert loss <= tolerance(precision)
    for name, value in states_differ(whole.content, parts.content).items():
        record_property(f"{name} differ by", value)
        allowed = STATE_TOLERANCE[COMPUTES.get(precision, precision)]
        assert value <= (0 if name in ("weights", "masters") else allowed), name
    assert whole.scale == parts.scale


# The loss scale is halved once or twice, and a step more or less is 0.01 of the last loss
STEEP = ("--lr", 0.03)


@rows(
    *(f"{DDP} 1 fp16", f"{APEX} 1 O1", f"{APEX} 1 O2", f"{HOROVOD} 1 fp16"),
    *(f"{REPLICAS} 1 fp16", f"{DDP} 2 fp16", f"{SPAWNED} 2 fp32"),
)
def test_it_adds_up_micro_batches_and_skips_infinite_gradients(
    train, on_the_cpu, record_property, strategy, processes, precision
):
    """As the whole batch on the CPU, where just as many steps are skipped on purpose.

    The learning rate is one at which a factor would show.
    """
    more = ["--accumulate", 2] + ["--compress-gradients", "fp16"] * (processes > 1)
    found = train(strategy, processes, precision, *STEEP, *more, net="steep")
    right = on_the_cpu(processes, found.skipped, "steep", *STEEP)
    loss = difference(found, right, EPOCHS)
    record_property("skipped steps", found.skipped)
    record_property("loss differs by", loss)
    # Micro-batches round once more; gradients twice as large were 0.026 off
    assert loss <= 2 * tolerance(precision)
    if precision != "fp32":
        unskipped = on_the_cpu(processes, 0, "steep", *STEEP)
        assert 0 < found.skipped < STEPS
        assert loss < difference(found, unskipped, EPOCHS) / 2


@rows(f"{DDP} 2 fp32", f"{APEX} 2 O0", f"{SPAWNED} 2 bf16")
def test_its_batch_norm_sees_the_whole_batch(
    here, train, on_the_cpu, record_property, strategy, processes, precision
):
    """As one process does, and as two without --sync-bn do not."""
    if not here.gpus:
        pytest.skip("a CPU: --sync-bn needs a GPU")
    found = train(strategy, processes, precision, *STEEP, "--sync-bn", net="norm")
    whole, parts = (
        difference(found, on_the_cpu(number, found.skipped, "norm", *STEEP), EPOCHS)
        for number in (1, processes)
    )
    record_property("loss differs by", whole)
    record_property("from one without --sync-bn", parts)
    assert whole <= 2 * tolerance(precision)
    assert whole < parts / 2


@rows(DDP, SPAWNED, APEX, HOROVOD, REPLICAS)
def test_its_launch_script_starts_it(here, photographs, tmp_path, on_the_cpu, strategy):
    """In the precision that it chooses, on one GPU."""
    argv = flags_of(here, photographs, tmp_path / "run")
    variables = {"NPROC": "1", "CUDA_VISIBLE_DEVICES": ",".join(here.gpus[:1])}
    variables["NVIDIA_TF32_OVERRIDE"] = "0"
    ended = launcher(strategy, *argv, timeout=seconds(), **variables)
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = came_to(tmp_path / "run")
    recipe = found.content["recipe"]
    precision = recipe.get("opt_level") or recipe["precision"]
    assert precision == ("O1" if strategy == APEX else "bf16") or not here.gpus
    assert difference(found, on_the_cpu(1, found.skipped)) <= tolerance(precision)


@rows(f"{DDP} 1 bf16", f"{REPLICAS} 1 bf16", f"{HOROVOD} 1 bf16", f"{APEX} 1 O1")
def test_it_compiles(
    train, on_the_cpu, record_property, strategy, processes, precision
):
    found = train(strategy, processes, precision, "--compile")
    loss = difference(found, on_the_cpu(processes, found.skipped))
    record_property("graphs", found.returned)
    record_property("loss differs by", loss)
    assert min(found.returned) > 0
    assert loss <= tolerance(precision)
