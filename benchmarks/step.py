"""Measure the training steps of distributed.py with two CPU processes.

    python -m benchmarks.step [ROUNDS]

The benchmark alternates between distributed.py's train(), a minimal DDP loop with the
same model, and a conventional loop (fp32, NCHW, metrics read in each step). It takes
five minutes, prints ratios and quartiles, and writes benchmarks/results/step.json.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comparison import (
    KEEP_MEMORY,
    ROOT,
    compared,
    interleave,
    parse_number,
    print_rows,
    write_results,
)
from common.data import DeviceLoader
from common.errors import one_line_errors
from common.model import PRECISIONS

PROCESSES = 2
STEPS = 10  # per measurement; the print interval is also 10 steps
# (image size, global batch size); the small sizes reveal overhead
CASES = ((64, 64), (224, 32))
VARIABLES = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
BARE, USUAL = "minimal loop", "conventional loop: fp32, NCHW"


def bare_loop(
    loader: DeviceLoader, model: nn.Module, precision: str
) -> Callable[[], None]:
    """Return a function that runs a minimal training loop."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, 0.9, weight_decay=1e-4)
    images, labels = loader.batch
    device, dtype = images.device, PRECISIONS[precision]
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    def run() -> None:
        model.train()
        for _ in range(STEPS):
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                outputs = model(images)
            loss = F.cross_entropy(outputs.float(), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return run


def usual_loop(args: Namespace, loader: DeviceLoader) -> Callable[[], None]:
    """Return a conventional loop that uses fp32 and reads the metrics in each step."""
    device = loader.device
    model = torchvision.models.get_model(args.arch).to(device)
    if dist.is_initialized():
        gpus = [device.index] if device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=gpus)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, 0.9, weight_decay=1e-4)
    host = loader.batch[0].cpu().contiguous(), loader.batch[1].cpu()
    if device.type == "cuda":
        host = host[0].pin_memory(), host[1].pin_memory()

    def run() -> None:
        for _ in range(STEPS):
            images, labels = host[0].to(device), host[1].to(device)
            outputs = model(images)
            loss = F.cross_entropy(outputs, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            hits = outputs.topk(5, dim=1).indices == labels.unsqueeze(1)
            loss.item(), hits[:, 0].float().mean().item(), hits.any(1).sum().item()

    return run


def timed(
    work: Callable[[], None], images: int, device: torch.device
) -> Callable[[], float]:
    """Return a function that runs work() and returns all ranks' total images/s."""

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif dist.is_initialized():
            dist.barrier()

    def measure() -> float:
        settle()
        began = time.perf_counter()
        work()
        settle()
        return images / (time.perf_counter() - began)

    return measure


def measure_in_turns(script: ModuleType, rounds: int) -> dict[str, dict]:
    """Run a script's main() up to train(), and compare train() with other loops."""
    train, found = script.train, {}

    class Measured(Exception):
        pass

    def measure(args, rank, loader, model, *others) -> None:
        checkpoint = others[-1]
        checkpoint.save_if_due = lambda: None  # not part of a step

        def ours() -> None:
            checkpoint.step = 0
            train(args, rank, loader, model, *others)

        works = {**loops(args, loader, model), f"{script.__name__}.py": ours}
        images = STEPS * args.global_batch_size
        timers = {name: timed(works[name], images, loader.device) for name in works}
        found.update(compared(interleave(timers, rounds), next(iter(works))))
        raise Measured

    script.train = measure
    try:
        script.main(script.arguments())
    except Measured:
        return found
    raise RuntimeError(f"{script.__name__}.py did not call its train()")


def loops(args: Namespace, loader: DeviceLoader, model: nn.Module) -> dict:
    """Return the loops to compare with train(); the first loop is the baseline."""
    # Share train()'s model, because its place in memory can change the speed by 5 %
    bare = bare_loop(loader, model, args.precision)
    return {BARE: bare, USUAL: usual_loop(args, loader)}


def one_process(output: str, rounds: str, *flags: str) -> None:
    """Run the measurements in one of the two processes."""
    script = importlib.import_module("distributed")

    sys.argv[1:] = flags
    rows = measure_in_turns(script, int(rounds))
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(rows))
    dist.barrier()
    os._exit(0)


def main() -> None:
    """Measure all CASES (image size, global batch size) and write the results."""
    if sys.argv[1:2] == ["--process"]:
        one_process(*sys.argv[2:])
    rounds = parse_number(__doc__, "ROUNDS", 10)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for size, batch in CASES:
            output = Path(folder, f"{size}.json")
            words = ["torch.distributed.run", "--standalone"]
            words += ["--nproc-per-node", PROCESSES, "-m", "benchmarks.step"]
            words += ["--process", output, rounds, "--synthetic", batch * STEPS]
            words += ["--image-size", size, "-b", batch]
            words += ["--output", Path(folder, f"run-{size}")]
            subprocess.run(
                [sys.executable, "-m", *map(str, words)],
                check=True,
                cwd=ROOT,
                env={**os.environ, **KEEP_MEMORY, **VARIABLES},
                stdout=subprocess.DEVNULL,
            )
            title = f"resnet18 at {size} px, {batch // PROCESSES} images per process"
            results[title] = json.loads(output.read_text())
            print_rows(title, "images/s", results[title])
    write_results("step", {"rounds": rounds, **results})


if __name__ == "__main__":
    with one_line_errors():
        main()
