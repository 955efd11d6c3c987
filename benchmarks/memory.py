"""Compare the memory of loader processes that hold ImageNet's index in arrays or lists.

    python -m benchmarks.memory [EPOCHS]

Four loader processes read 1,281,167 entries in random order, without decoding. They
belong to the five scripts' DataLoader, or to a DataLoader whose dataset holds a
conventional list of (path, label). The benchmark prints a loader process's private
memory and writes benchmarks/results/memory.json in a few minutes.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterable
from multiprocessing import active_children
from pathlib import Path

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from benchmarks.comparison import parse_number, write_results
from benchmarks.input import CPU, arguments
from common.data import build_loader
from common.errors import one_line_errors

IMAGES, CLASSES, WORKERS, BATCH = 1_281_167, 1000, 4, 1024
KINDS = {"lists": "list of (path, label)", "arrays": "array"}
NO_IMAGE = torch.zeros(3, 1, 1, dtype=torch.uint8)


class Index(Dataset):
    """A dataset without images, but with paths and labels like ImageNet's."""

    def __init__(self, packed: bool):
        """Store entries in arrays, like common.data, or in a list, like torchvision."""
        labels = [number * CLASSES // IMAGES for number in range(IMAGES)]
        paths = [
            f"/data/imagenet/train/n{label:08d}/n{label:08d}_{number % 100000}.JPEG"
            for number, label in enumerate(labels)
        ]
        self.samples = None if packed else list(zip(paths, labels, strict=True))
        if packed:
            self.paths = numpy.array([path.encode() for path in paths])
            self.labels = numpy.array(labels)

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.samples is None:
            path, label = self.paths[index].decode(), int(self.labels[index])
        else:
            path, label = self.samples[index]
        return NO_IMAGE[: len(path)], label


def loader_of(kind: str) -> Iterable:
    """Build a conventional loader with lists, or the five scripts' loader."""
    index = Index(packed=kind == "arrays")
    if kind == "lists":
        options = {"num_workers": WORKERS, "persistent_workers": True}
        options |= {"multiprocessing_context": "fork"}  # as in the scripts' loader
        return DataLoader(index, BATCH, shuffle=True, **options)
    args, place = arguments(Path(), "-b", BATCH, "-j", WORKERS), (0, 1, CPU)
    return build_loader(args, index, RandomSampler(index), *place, training=True)


def unique_mib() -> float:
    """Return the loader processes' median private memory in MiB."""
    found = []
    for child in active_children():
        lines = Path(f"/proc/{child.pid}/smaps_rollup").read_text().splitlines()
        found.append(sum(int(one.split()[1]) for one in lines if "Private_" in one))
    return statistics.median(found) / 1024


def measure(kind: str, epochs: int) -> list[float]:
    """Return a loader process's memory in MiB after the first batch and each epoch."""
    history, loader = [], loader_of(kind)
    for _ in range(epochs):
        for _ in loader if kind == "lists" else loader.epoch(0):
            history = history or [unique_mib()]
        history.append(unique_mib())
    return history


def main() -> None:
    """Measure all KINDS, each in its own process."""
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
        return
    epochs = parse_number(__doc__, "EPOCHS", 8)
    index, history = {}, {}
    for kind, name in KINDS.items():
        command = [sys.executable, "-m", "benchmarks.memory", "--measure", kind]
        history[name] = json.loads(subprocess.check_output([*command, str(epochs)]))
        first, *_, last = history[name]
        index[name] = {
            "loader process, first batch": first,
            f"after {epochs} shuffled epochs": last,
            "growth": last - first,
        }
        print(f"{name}, MiB: {index[name]}", flush=True)
    results = {"images": IMAGES, "workers": WORKERS, "epochs": epochs, "index": index}
    write_results("memory", {**results, "history": history})


if __name__ == "__main__":
    with one_line_errors():
        main()
