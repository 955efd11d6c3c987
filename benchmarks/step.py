"""Speed of a training step of distributed.py on two CPU processes.

    python -m benchmarks.step [ROUNDS]

1. Against a bare DistributedDataParallel loop with the same model, precision, memory
   format and data: what metrics, schedule, seeds, progress and readiness to stop cost.
2. Training from JPEG files, after the first steps, against the usual script in fp32.

Both are measured in turns. Prints median ratios with their quartiles and writes
results/step.json. Takes a quarter of an hour.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch.nn.parallel import DistributedDataParallel

import distributed
from benchmarks.comparison import compared, interleave, print_rows, write_results
from benchmarks.photographs import write_photographs
from common.data import DeviceLoader
from common.device import autocast_dtype
from common.errors import exit_status
from common.launch import Watchdog

PROCESSES = 2
STEPS = 10  # of a measurement, one print interval
# (image size, global batch): overhead shows at small ones
CASES = ((64, 64), (224, 32))
BARE, OURS = "bare DDP loop", "distributed.py"
AGAIN = "bare DDP loop, a second one"  # shows what the place in memory makes
USUAL = "usual script, fp32"
ROOT = Path(__file__).resolve().parent.parent


def torchrun(module: str, *arguments: object) -> None:
    """Run a module in two processes of one thread each."""
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(PROCESSES), "-m", module]
    subprocess.run(
        [sys.executable, *launcher, *map(str, arguments)],
        check=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )


# --- 1. the step ---


def steps_in_turns(output: str, rounds: str, *flags: str) -> None:
    """One of the two processes: runs main() of distributed.py up to its train().

    In the place of train() it measures train(), and a bare loop, one after the other.
    """
    train = distributed.train

    def measure(args: Namespace, rank: int, loader: DeviceLoader, *others) -> None:
        for number in Watchdog.SIGNALS:  # a benchmark just ends
            signal.signal(number, signal.SIG_DFL)
        state = others[1]
        bare = bare_loop(args, loader, args.precision)
        # Saving is not part of a step; on its own it is measured by nobody here
        state.save = lambda: None

        def ours() -> None:
            state.step = 0
            train(args, rank, loader, *others)

        again = bare_loop(args, loader, args.precision)
        loops = {BARE: timed(bare), AGAIN: timed(again), OURS: timed(ours)}
        found = interleave(loops, int(rounds))
        if rank == 0:
            Path(output).write_text(json.dumps(found))
        dist.barrier()
        os._exit(0)

    distributed.train = measure
    distributed.main(distributed.arguments(list(flags)))


def timed(work):
    """Measures steps per second of work(), which does STEPS of them."""

    def measure() -> float:
        dist.barrier()
        began = time.perf_counter()
        work()
        dist.barrier()
        return STEPS / (time.perf_counter() - began)

    return measure


def bare_loop(
    args: Namespace,
    loader: DeviceLoader,
    precision: str,
    layout: torch.memory_format = torch.channels_last,
    wrap: bool = True,
) -> Callable[[], None]:
    """The least that trains this model, with DistributedDataParallel or without.

    Args:
        layout: of the weights; images have the script's.
    """
    torch.manual_seed(args.seed)
    model = torchvision.models.get_model(args.arch)
    model.to(loader.device, memory_format=layout)
    if args.compile:
        model.compile()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=1e-4)
    if wrap:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        model.broadcast_buffers = False
    images, labels = loader.images, loader.labels
    kind, dtype = images.device.type, autocast_dtype(precision)
    scaler = torch.amp.GradScaler(kind, enabled=precision == "fp16")

    def run() -> None:
        for _ in range(STEPS):
            with torch.autocast(kind, dtype, enabled=dtype != torch.float32):
                outputs = model(images)
            loss = F.cross_entropy(outputs.float(), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return run


def compare_steps(rounds: int, folder: Path) -> dict[str, dict]:
    """Measure all CASES."""
    results = {}
    for size, batch in CASES:
        flags = ["--synthetic", batch * STEPS, "--image-size", size, "-b", batch]
        flags += ["--output", folder / f"run-{size}", "--device", "cpu"]
        output = folder / f"{size}.json"
        torchrun("benchmarks.step", "--process", output, rounds, *flags)
        rows = compared(json.loads(output.read_text()), BARE)
        title = f"resnet18 at {size} px, {batch // PROCESSES} images per process"
        print_rows(f"step, {title}", "steps/s", rows)
        results[title] = rows
    return results


# --- 2. the whole training ---


def compare_training(rounds: int, folder: Path) -> dict[str, dict]:
    """Launch both scripts in turns."""
    batch, steps, warmup, workers = 64, 10, 2, PROCESSES
    images = write_photographs(folder, batch * steps, batch, classes=8)
    print(images)

    def usual() -> float:
        output = folder / "usual.txt"
        arguments = [folder, batch, steps, warmup, workers, output]
        torchrun("benchmarks.usual_training", *arguments)
        return float(output.read_text())

    def ours(*flags: str) -> float:
        output = Path(tempfile.mkdtemp(dir=folder))
        launch = ["bash", "scripts/distributed.sh", "--data", folder, "-b", batch]
        launch += ["--epochs", 1, "--workers", workers, "--print-interval", warmup]
        launch += ["--output", output, "--device", "cpu", *flags]
        environment = {**os.environ, "PYTHON": sys.executable, "NPROC": str(PROCESSES)}
        environment["OMP_NUM_THREADS"] = "1"  # as torchrun() gives the other script
        subprocess.run(
            map(str, launch),
            check=True,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        record = json.loads((output / "epochs.jsonl").read_text())
        assert record["warmup_steps"] == warmup
        return record["images_per_second"]

    candidates = {
        USUAL: usual,
        "distributed.py": ours,
        "distributed.py --precision fp32": lambda: ours("--precision", "fp32"),
    }
    rows = compared(interleave(candidates, rounds), USUAL)
    print_rows("training, resnet18 at 224 px, JPEG files", "images/s", rows)
    return rows


def main() -> None:
    """Measure both."""
    if sys.argv[1:2] == ["--process"]:
        steps_in_turns(*sys.argv[2:])
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as folder:
        steps = compare_steps(2 * rounds, Path(folder))
        training = compare_training(rounds, Path(folder))
    write_results("step", {"rounds": rounds, **steps, "training": training})


if __name__ == "__main__":
    with exit_status():
        main()
