"""Compare every strategy on one GPU and on two with the CPU: pytest -m gpu tests/gpu.

The CPU run uses distributed.py, which tests/test_reference.py compares with plain PyTorch.
scripts/gpu_check.sh runs these rows; --rehearse-gpu runs the rows that can run on the CPU.
"""

import functools
import json
import math
import os
import time

import pytest
import torch
from conftest import launcher

from benchmarks import STRATEGIES
from benchmarks.comparison import commit, gpu_names
from benchmarks.photographs import write_photographs
from common.model import best_precision

LIMIT = 100  # seconds per run
RESERVE = 40  # a row does not start if fewer seconds are left
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(6 * LIMIT)]
# Largest difference in an epoch's loss between two runs that should be equal. On an H100,
# fp32 without TF32 was at most 4e-4 from the CPU's fp32 (with TF32: 0.0023), bf16 0.003,
# fp16 and O1 to O3 0.006.
TOLERANCE = {"fp32": 1e-3, "bf16": 0.02, "fp16": 0.02}
TOLERANCE |= {"O0": 1e-3, "O1": 0.02, "O2": 0.02, "O3": 0.05}
RESUMED = 3e-3  # largest difference between two runs of the same precision
STEPS = 4
RECIPE = f"-b 16 --epochs 2 --max-steps {STEPS} --lr 0.001 --warmup-epochs 0 -j 2 "
RECIPE = (RECIPE + f"--print-interval {STEPS} --decoder pil --image-size 64").split()
MARKS = {f"{x}_distributed": getattr(pytest.mark, x) for x in ("apex", "horovod")}


def rows():
    for name in STRATEGIES:
        levels = ("fp32", "bf16", "fp16")
        for level in ("O0", "O1", "O2", "O3") if name[0] == "a" else levels:
            yield pytest.param(name, level, marks=MARKS.get(name, ()))


@pytest.fixture(autouse=True)
def enough_time():
    """If time is short, end the row with an error, so that --last-failed runs the row later."""
    if float(os.environ.get("GPU_CHECK_UNTIL", "inf")) - time.time() < RESERVE:
        pytest.fail("not run: time is up", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def versions(record_testsuite_property):
    record_testsuite_property("commit", commit() or "")


@pytest.fixture(scope="session")
def photographs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photographs")
    write_photographs(folder, train=64, val=16, classes=8)
    return folder


@pytest.fixture(scope="session")
def train(photographs, tmp_path_factory):
    """Train with a launch script (NPROC is 1 by default); return epochs.jsonl's records."""

    def run(strategy, *flags, output=None, NPROC="1", **variables):
        output = output or tmp_path_factory.mktemp("run")
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(gpu_names()[: int(NPROC)])}
        variables = {"NPROC": NPROC, "timeout": LIMIT, **gpus, **variables}
        command = ["--data", photographs, *RECIPE, "--output", output]
        ended = launcher(strategy, *command, *flags, **variables)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        lines = (output / "epochs.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return run


@pytest.fixture(scope="session")
def on_the_cpu(train):
    fp32 = ("distributed", "--precision", "fp32")
    return functools.cache(lambda n: train(*fp32, NPROC=n, CUDA_VISIBLE_DEVICES=""))


def difference(one, other):
    """Return the largest difference in a loss, or infinity if a loss is not a number."""
    pairs = zip(one, other, strict=True)
    found = [abs(a[n] - b[n]) for a, b in pairs for n in ("train_loss", "val_loss")]
    return max(found) if all(map(math.isfinite, found)) else math.inf


def flags_of(level):
    return ("--opt-level" if level[0] == "O" else "--precision", level)


@pytest.mark.parametrize("count", "12")
@pytest.mark.parametrize("strategy, level", [*rows()])
def test_gpus_do_what_the_cpu_does(
    train, on_the_cpu, strategy, level, count, record_property
):
    gpus = torch.cuda.device_count()
    best = best_precision(torch.device("cuda")) if gpus else "bf16"
    if level == "bf16" and best != "bf16":
        pytest.skip("this GPU has no native bf16")
    if count == "2" and (gpus == 1 or strategy == "dataparallel"):
        one, other = "there is one GPU", "batch norm sees other images than with DDP"
        pytest.skip(one if gpus == 1 else other)
    exact = {"NVIDIA_TF32_OVERRIDE": "0"} if level in ("fp32", "O0") else {}
    ran = train(strategy, *flags_of(level), NPROC=count, **exact)
    found = difference(ran, on_the_cpu(count))
    record_property("loss differs by", f"{found:.3g}")
    assert found <= TOLERANCE[level]


@pytest.mark.parametrize(
    "flags", ["--accumulate 2", "--compile", "--sync-bn", "--compress-gradients fp16"]
)
def test_distributed_with(train, flags, pytestconfig, record_property):
    """Micro-batches change batch norm's statistics, so the losses match only roughly."""
    if flags == "--sync-bn" and pytestconfig.getoption("rehearse_gpu"):
        pytest.skip("SyncBatchNorm needs a GPU")
    fp32 = ("distributed", "--precision", "fp32")
    found = difference(train(*fp32, *flags.split()), train(*fp32))
    record_property("loss differs by", f"{found:.3g}")
    assert found <= (0.3 if flags == "--accumulate 2" else 0.02)


@pytest.mark.parametrize(
    "strategy, level", [one for one in rows() if one.values[1] in ("fp16", "O2")]
)
def test_a_resumed_run_ends_as_a_whole_one(train, strategy, level, tmp_path):
    whole = train(strategy, *flags_of(level))
    parts = tmp_path / "parts"
    train(strategy, *flags_of(level), "--epochs", 1, output=parts)
    resumed = train(strategy, *flags_of(level), "--resume", output=parts)
    assert difference(whole, resumed) <= RESUMED
