"""Measure how much doctor slows down the training steps of ResNet-50.

    python -m benchmarks.doctor [ROUNDS]

Two jobs take turns: one runs alone, the other under doctor; each has two processes.
The benchmark compares the steps that doctor watches, the steps that it only times, and
5 * ROUNDS later steps with the other job's steps. It takes a few minutes, and writes
benchmarks/results/doctor.json.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torchvision
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.comparison import (
    KEEP_MEMORY,
    ROOT,
    compared,
    interleave,
    parse_number,
    print_rows,
    write_results,
)

STEPS, BATCH, SIZE = 5, 4, 224  # steps in a turn, images per process and step, pixels
WATCHED, TIMED = 40, 20  # steps that doctor watches, and steps that it only times
ALONE, UNDER = "alone", "under doctor"


def job(folder: Path) -> None:
    """Take STEPS training steps per line of FOLDER/orders; report seconds per step."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images = torch.randn(64 * BATCH, 3, SIZE, SIZE)
    data = TensorDataset(images, torch.randint(1000, (len(images),)))
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data))
    model = DDP(torchvision.models.resnet50())
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    batches = (batch for _ in range(99) for batch in loader)
    first = dist.get_rank() == 0
    orders = (folder / "orders").open() if first else None
    answers = (folder / "answers").open("w") if first else None
    while True:
        more = torch.tensor(bool(first and orders.readline()))
        dist.broadcast(more, 0)
        if not more:
            break
        began = time.perf_counter()
        for _ in range(STEPS):
            x, y = next(batches)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        dist.barrier()
        if first:
            print((time.perf_counter() - began) / STEPS, file=answers, flush=True)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    (folder / f"memory{dist.get_rank()}").write_text(f"{memory}")


def start(folder: Path, *before: str) -> tuple[subprocess.Popen, Callable, Callable]:
    """Start a job; return its process, a function to run steps, and one to end it."""
    folder.mkdir()
    for name in ("orders", "answers"):
        os.mkfifo(folder / name)
    command = [sys.executable, "-m", *before, "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "benchmarks.doctor", "--job", folder]
    variables = {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **KEEP_MEMORY}
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **variables})
    orders, answers = (folder / "orders").open("w"), (folder / "answers").open()

    def step() -> float:
        print("go", file=orders, flush=True)
        return float(answers.readline())

    return process, step, orders.close


def main() -> None:
    """Compare a job that runs alone with a job that runs under doctor."""
    if sys.argv[1:2] == ["--job"]:
        return job(Path(sys.argv[2]))
    rounds, found = parse_number(__doc__, "ROUNDS", 16), {}
    with tempfile.TemporaryDirectory() as name:
        folders = {one: Path(name, one.replace(" ", "-")) for one in (ALONE, UNDER)}
        under = "doctor", "--", sys.executable, "-m"
        started = {one: start(folders[one], *under * (one == UNDER)) for one in folders}
        works = {one: step for one, (_, step, _) in started.items()}
        for title, count in (
            ("watched steps", WATCHED // STEPS - 1),
            ("timed steps", TIMED // STEPS - 1),
            ("later steps", rounds),
        ):
            found[title] = compared(interleave(works, count), ALONE)
            print_rows(title, "s", found[title])
        files = [*folders[UNDER].glob("doctor-*/*.events")]
        found["log MiB"] = sum(path.stat().st_size for path in files) / 2**20
        for process, _, end in started.values():
            end()
            process.wait()
        for one, folder in folders.items():
            memory = [float(path.read_text()) for path in folder.glob("memory*")]
            found[f"MiB of a process {one}"] = sum(memory) / len(memory)
    write_results("doctor", {"rounds": rounds, **found})


if __name__ == "__main__":
    main()
