"""Memory of the index of ImageNet in loader processes, against the usual lists.

    python -m benchmarks.memory [EPOCHS]

Four loader processes read 1,281,167 entries in random order, without decoding, through
the DataLoader of the five scripts, with and without its gc.freeze(), and through the
usual one, whose data set holds a list of (path, label). Prints the memory that a loader
process shares with no other, and writes results/memory.json. Takes some minutes.
"""

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from multiprocessing import active_children
from pathlib import Path

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from benchmarks.comparison import write_results
from benchmarks.input import CPU, arguments
from common.data import PackedPaths, build_loader, share_out
from common.errors import exit_status

IMAGES, CLASSES, WORKERS, BATCH = 1_281_167, 1000, 4, 1024
ROOT = "/data/imagenet/train"
KINDS = {
    "lists": "list of (path, label)",
    "packed": "packed",
    "unfrozen": "packed, without `gc.freeze()`",
}
NO_IMAGE = torch.zeros(3, 1, 1, dtype=torch.uint8)


def samples() -> Iterator[tuple[str, int]]:
    """Paths as long as ImageNet's, and labels."""
    for number in range(IMAGES):
        label = number * CLASSES // IMAGES
        name = f"n{1440764 + 13 * label:08d}"
        yield f"{ROOT}/{name}/{name}_{number % 100000}.JPEG", label


class Listed(Dataset):
    """Keeps its index as torchvision's ImageFolder does."""

    def __init__(self) -> None:
        self.samples = list(samples())

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        return NO_IMAGE[: len(path)], label


class Packed(Dataset):
    """Keeps its index as common.data.ImageFolder does."""

    def __init__(self) -> None:
        self.paths = PackedPaths(ROOT, (path for path, _ in samples()))
        self.labels = numpy.fromiter((label for _, label in samples()), numpy.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return NO_IMAGE[: len(self.paths[index])], int(self.labels[index])


def loader_of(kind: str) -> Iterable:
    """The usual loader of lists, or that of the five scripts."""
    if kind == "unfrozen":
        gc.freeze = lambda: None
    if kind == "lists":
        return DataLoader(
            Listed(), BATCH, True, num_workers=WORKERS, persistent_workers=True
        )
    args = arguments(Path(), "auto", WORKERS)
    args.global_batch_size = BATCH
    share_out(args, 0, 1, 1)
    packed = Packed()
    return build_loader(args, packed, RandomSampler(packed), CPU, training=True)


def unique_mib(pid: int) -> float:
    """Memory that one process shares with no other, in MiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if "Private_" in line) / 1024


def resident_mib() -> float:
    """Memory of this process, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def measure(kind: str, epochs: int) -> dict:
    """Read all entries `epochs` times; a fresh process calls this."""
    before, began = resident_mib(), time.perf_counter()
    loader = loader_of(kind)
    seconds = time.perf_counter() - began
    found = {"parent_mib": resident_mib() - before, "index_seconds": seconds}
    history = []
    for epoch in range(epochs):
        for number, _ in enumerate(loader):
            if epoch == number == 0:
                history.append(workers_mib())
        history.append(workers_mib())
    return {**found, "worker_mib": history}


def workers_mib() -> float:
    """Median of the loader processes' own memory."""
    return statistics.median(unique_mib(child.pid) for child in active_children())


def main() -> None:
    """Measure both, each in a process of its own."""
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
        return
    epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    index, history = {}, {}
    for kind, name in KINDS.items():
        command = [sys.executable, "-m", "benchmarks.memory", "--measure", kind]
        output = subprocess.run(
            [*command, str(epochs)], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        history[name] = json.loads(output)
        mib = history[name]["worker_mib"]
        index[name] = {
            "training process": history[name].pop("parent_mib"),
            "loader process, first batch": mib[0],
            f"after {epochs} shuffled epochs": mib[-1],
            "growth": mib[-1] - mib[0],
        }
        print(f"{name}, MiB: {index[name]}", flush=True)
    setup = {"images": IMAGES, "workers": WORKERS, "epochs": epochs}
    write_results("memory", {**setup, "index": index, "history": history})


if __name__ == "__main__":
    with exit_status():
        main()
