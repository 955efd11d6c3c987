"""Every strategy on a GPU, compared with the same training on the CPU: pytest -m gpu tests/gpu.

The CPU's is distributed.py's, which tests/test_reference.py holds to plain PyTorch. Rows come
in the order of their importance. scripts/gpu_check.sh runs them on a machine without more than
PyTorch and pytest; --rehearse-gpu runs on the CPU what can run there, at a smaller size.
"""

import functools
import json
import math
import os
import time
from argparse import Namespace

import pytest
import torch
from conftest import launcher
from ranks import train_watched
from test_equality import start

from benchmarks.photographs import write_photographs
from common.log import commit

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
RECIPE = f"-b {BATCH} --epochs {EPOCHS} --max-steps {STEPS} --lr 0.001"
RECIPE += f" --warmup-epochs 0 --print-interval {STEPS} --workers 2 --decoder pil"
COMPUTES = {"O0": "fp32", "O1": "fp16", "O2": "fp16", "O3": "O3"}
DDP, SPAWNED, REPLICAS = "distributed", "multiprocessing_distributed", "dataparallel"
APEX, HOROVOD = "apex_distributed", "horovod_distributed"
MARKS = {APEX: pytest.mark.apex, HOROVOD: pytest.mark.horovod}


def row(strategy, *others):
    """Parameters of a test; its name says them."""
    return pytest.param(
        strategy,
        *others,
        marks=MARKS.get(strategy, ()),
        id="-".join(str(one) for one in (strategy, *others) if one != ""),
    )


def rows(strategy, processes):
    precisions = (
        ("O0", "O1", "O2", "O3") if strategy == APEX else ("fp32", "bf16", "fp16")
    )
    return [row(strategy, processes, one) for one in precisions]


@pytest.fixture(scope="session")
def here(pytestconfig):
    """What rows compute on."""
    if pytestconfig.getoption("rehearse_gpu"):
        return Namespace(device="cpu", gpus=0, size=32)
    return Namespace(device="cuda", gpus=torch.cuda.device_count(), size=64)


def seconds():
    """How long processes may take, of what scripts/gpu_check.sh leaves of its time."""
    return min(LIMIT, float(os.environ.get("GPU_CHECK_UNTIL", "inf")) - time.time())


@pytest.fixture(autouse=True)
def enough_time():
    """Else the row ends in an error, so that --last-failed runs it."""
    if seconds() < RESERVE:
        pytest.fail("not run: time is up", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def versions(record_testsuite_property):
    record_testsuite_property("commit", commit() or "")


@pytest.fixture(scope="session")
def photographs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photographs")
    write_photographs(folder, train=IMAGES, val=IMAGES // 4, classes=8)
    return folder


def flags_of(here, data, output, device, *flags):
    """The command line of a run."""
    argv = ["--data", data, *RECIPE.split(), "--image-size", here.size]
    argv += ["--device", device, "--output", output, *flags]
    return [str(flag) for flag in argv]


def computing(precision):
    """The flags that choose it."""
    return ("--opt-level" if precision[0] == "O" else "--precision", precision)


def visible(here, number):
    """The first of the GPUs that may be used, for CUDA_VISIBLE_DEVICES."""
    every = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    every = every if every[0] else [str(one) for one in range(here.gpus)]
    return ",".join(every[:number])


@pytest.fixture
def train(here, photographs, tmp_path):
    """Train by one of the scripts; returns what it came to. Skips what cannot be had."""

    def run(strategy, processes, precision, *flags, net=None, output="run"):
        if strategy == HOROVOD and here.gpus == 1 < processes:
            pytest.skip("one GPU: Horovod has no Gloo for GPUs, NCCL wants one each")
        if strategy == REPLICAS and here.gpus < processes > 1:
            pytest.skip("no second GPU for a replica")
        if here.gpus and here.gpus < processes:
            flags += "--backend", "gloo"
        flags = *computing(precision), *flags
        argv = flags_of(here, photographs, tmp_path / output, here.device, *flags)
        number = 1 if strategy == REPLICAS else processes
        arguments = {"name": strategy, "flags": argv, "net": net, "skipped": 0}
        arguments["gpus"] = visible(here, processes) if strategy == REPLICAS else ""
        logs = tmp_path / f"{output} of processes"
        returned = start(strategy)(
            logs, number, train_watched, seconds=seconds(), **arguments
        )
        found = came_to(tmp_path / output, returned)
        names = ("device", "world_size", "precision")
        asked = [here.device, number, precision]
        assert [found.report[name] for name in names] == asked
        return found

    return run


def came_to(output, returned=None):
    """What a run left in its output folder."""
    records = [json.loads(line) for line in open(output / "epochs.jsonl")]
    content = torch.load(
        output / "checkpoint.pt", map_location="cpu", weights_only=True
    )
    scale = content.get("amp", {}).get("loss_scaler0") or content["scaler"]
    factor = scale.get("scale", scale.get("loss_scale", 0))
    return Namespace(
        losses=[record["train_loss"] for record in records],
        content=content,
        scale=scale,
        skipped=round(math.log2(2**16 / factor)) if factor > 1 else 0,
        returned=returned,
        report=json.loads((output / "report.json").read_text()),
    )


@pytest.fixture(scope="session")
def on_the_cpu(here, photographs, tmp_path_factory):
    """The same training in fp32, of which the first steps are skipped as in a run."""

    @functools.cache
    def of(processes, skipped=0, net=None, *flags):
        output = tmp_path_factory.mktemp("cpu") / "run"
        flags = flags_of(here, photographs, output, "cpu", *computing("fp32"), *flags)
        arguments = {"name": DDP, "flags": flags, "net": net, "skipped": skipped}
        logs = output.with_name("processes")
        returned = start(DDP)(
            logs, processes, train_watched, seconds=seconds(), gpus="", **arguments
        )
        return came_to(output, returned)

    return of


def difference(found, right, epochs=1):
    """Between training losses; infinite where one is no number."""
    assert len(found.losses) == len(right.losses) == EPOCHS
    pairs = zip(found.losses[:epochs], right.losses, strict=False)
    values = [abs(one - other) for one, other in pairs]
    return max(math.inf if math.isnan(value) else value for value in values)


def pixels_differ(found, right):
    """By how much, in what the first convolutions of all processes got."""
    pairs = [
        pair
        for ranks in zip(found.returned, right.returned, strict=True)
        for pair in zip(*ranks, strict=True)
    ]
    assert len(pairs) == STEPS * len(found.returned)
    return max((one - other).abs().max().item() for one, other in pairs)


ORDER = [(DDP, 1), (APEX, 1), (DDP, 2), (REPLICAS, 1), (SPAWNED, 1), (HOROVOD, 1)]
ORDER += [(SPAWNED, 2), (APEX, 2), (HOROVOD, 2), (REPLICAS, 2)]
TRAININGS = [one for place in ORDER for one in rows(*place)]


@pytest.mark.parametrize("strategy, processes, precision", TRAININGS)
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
    assert loss <= LOSS_TOLERANCE[COMPUTES.get(precision, precision)]


RESUMED = [
    row(DDP, 1, "fp16", ""),
    row(APEX, 1, "O1", ""),
    row(APEX, 1, "O2", ""),
    row(HOROVOD, 1, "fp16", ""),
    row(DDP, 2, "bf16", ""),
    row(REPLICAS, 1, "bf16", ""),
    row(DDP, 1, "fp32", ""),
    row(DDP, 1, "bf16", "--compile"),
]


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


@pytest.mark.parametrize("strategy, processes, precision, compiled", RESUMED)
def test_it_resumes(train, record_property, strategy, processes, precision, compiled):
    """In one piece and in two. At learning rate 0 the weights stay, so that rounding does
    not grow; gradients go into momenta, images into losses and batch norm's statistics."""
    how = (strategy, processes, precision, "--lr", 0, *filter(None, [compiled]))
    whole = train(*how, output="whole")
    train(*how, "--epochs", EPOCHS // 2, output="parts")
    parts = train(*how, "--resume", "auto", output="parts")
    computes = COMPUTES.get(precision, precision)
    loss = difference(whole, parts, EPOCHS)
    record_property("loss differs by", loss)
    assert loss <= LOSS_TOLERANCE[computes]
    for name, value in states_differ(whole.content, parts.content).items():
        record_property(f"{name} differ by", value)
        exact = name in ("weights", "masters")
        assert value <= (0 if exact else STATE_TOLERANCE[computes]), name
    assert whole.scale == parts.scale


# The loss scale is halved once or twice, and a step more or less is 0.01 of the last loss
STEEP = ("--lr", 0.03)
PARTS = [row(DDP, 1, "fp16"), row(APEX, 1, "O1"), row(APEX, 1, "O2")]
PARTS += [row(HOROVOD, 1, "fp16"), row(DDP, 2, "fp16"), row(SPAWNED, 2, "fp32")]


@pytest.mark.parametrize("strategy, processes, precision", PARTS)
def test_it_adds_up_micro_batches(
    train, on_the_cpu, record_property, strategy, processes, precision
):
    """As the whole batch on the CPU, at a learning rate at which a factor would show."""
    more = ["--accumulate", 2] + ["--compress-gradients", "fp16"] * (processes > 1)
    found = train(strategy, processes, precision, *STEEP, *more, net="steep")
    loss = difference(
        found, on_the_cpu(processes, found.skipped, "steep", *STEEP), EPOCHS
    )
    record_property("loss differs by", loss)
    # Micro-batches round once more; gradients twice as large were 0.026 off
    assert loss <= 2 * LOSS_TOLERANCE[COMPUTES.get(precision, precision)]


SYNCHRONIZED = [row(DDP, 2, "fp32"), row(APEX, 2, "O0"), row(SPAWNED, 2, "bf16")]
SYNCHRONIZED += [row(HOROVOD, 2, "fp32"), row(APEX, 2, "O1")]


@pytest.mark.parametrize("strategy, processes, precision", SYNCHRONIZED)
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
    assert whole <= 2 * LOSS_TOLERANCE[COMPUTES.get(precision, precision)]
    assert whole < parts / 2


OVERFLOWS = [row(DDP, 1, "fp16"), row(APEX, 1, "O1"), row(DDP, 2, "fp16")]
OVERFLOWS += [row(one, 1, "fp16") for one in (HOROVOD, REPLICAS, SPAWNED)]


@pytest.mark.parametrize("strategy, processes, precision", OVERFLOWS)
def test_it_skips_steps_with_infinite_gradients(
    train, on_the_cpu, record_property, strategy, processes, precision
):
    """And no others: as on the CPU, where just as many are skipped on purpose."""
    found = train(strategy, processes, precision, *STEEP, net="steep")
    record_property("skipped steps", found.skipped)
    losses = {}
    for skipped in (found.skipped, 0):
        right = on_the_cpu(processes, skipped, "steep", *STEEP)
        losses[skipped] = difference(found, right, EPOCHS)
    record_property("loss differs by", losses[found.skipped])
    record_property("from one without skipped steps", losses[0])
    assert 0 < found.skipped < STEPS
    assert losses[found.skipped] <= LOSS_TOLERANCE["fp16"] < losses[0] / 2


@pytest.mark.parametrize(
    "strategy", [row(one) for one in (DDP, SPAWNED, APEX, HOROVOD, REPLICAS)]
)
def test_its_launch_script_starts_it(here, photographs, tmp_path, on_the_cpu, strategy):
    """In the precision that it chooses, on one GPU."""
    argv = flags_of(here, photographs, tmp_path / "run", here.device)
    variables = {"NPROC": "" if strategy == REPLICAS else "1"}
    if here.gpus:
        variables["CUDA_VISIBLE_DEVICES"] = visible(here, 1)
    variables["NVIDIA_TF32_OVERRIDE"] = "0"
    ended = launcher(strategy, *argv, timeout=seconds(), **variables)
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = came_to(tmp_path / "run")
    precision = found.report["precision"]
    expected = "O1" if strategy == APEX else "bf16"
    assert precision == expected or not here.gpus
    loss = difference(found, on_the_cpu(1, found.skipped))
    assert loss <= LOSS_TOLERANCE[COMPUTES.get(precision, precision)]


COMPILED = [row(DDP, 1, "bf16"), row(REPLICAS, 1, "bf16"), row(SPAWNED, 1, "fp16")]
COMPILED += [row(HOROVOD, 1, "bf16"), row(APEX, 1, "O1"), row(DDP, 2, "fp32")]


@pytest.mark.parametrize("strategy, processes, precision", COMPILED)
def test_it_compiles(
    train, on_the_cpu, record_property, strategy, processes, precision
):
    found = train(strategy, processes, precision, "--compile")
    loss = difference(found, on_the_cpu(processes, found.skipped))
    record_property("graphs", found.returned)
    record_property("loss differs by", loss)
    assert min(found.returned) > 0
    assert loss <= LOSS_TOLERANCE[COMPUTES.get(precision, precision)]
