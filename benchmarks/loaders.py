"""Compare two ways to start loader processes: fork, and a fork server.

    python -m benchmarks.loaders [ROUNDS]

Two loader processes read generated photographs through an index as long as ImageNet's.
The fork server has already imported torchvision. Each round starts both kinds in new
processes. The benchmark writes benchmarks/results/loaders.json in a few minutes.
"""

import json
import multiprocessing
import random
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy
import torch
from torch.utils.data import DataLoader

from benchmarks.comparison import ROOT, parse_number, spread, write_results
from benchmarks.input import CPU, arguments
from benchmarks.memory import IMAGES, unique_mib
from benchmarks.photographs import write_photographs
from common import data

METHODS, PHOTOGRAPHS, STEPS, BATCH = ("fork", "forkserver"), 384, 120, 32


def measure(method: str, folder: Path) -> dict[str, float]:
    """Start two loader processes, and read some batches."""

    def loader(*given, **options) -> DataLoader:
        options |= {"multiprocessing_context": method, "worker_init_fn": None}
        return DataLoader(*given, **options)

    data.DataLoader = loader
    multiprocessing.set_forkserver_preload(["torchvision"])
    torch.set_num_threads(1)
    args = arguments(folder, "-b", BATCH, "-j", 2, "--max-steps", STEPS)
    dataset = data.build_datasets(args)[0]
    dataset.paths = numpy.resize(dataset.paths, IMAGES)
    dataset.labels = numpy.resize(dataset.labels, IMAGES)
    began = time.perf_counter()
    batches = data.build_loader(args, dataset, range(IMAGES), 0, 1, CPU, training=True)
    batches.copy = lambda *batch: batch
    epoch = batches.epoch(0)
    next(epoch)
    first = time.perf_counter()
    memory, count = unique_mib(), sum(len(labels) for _, labels in epoch)
    return {
        "seconds to the first batch": first - began,
        "private MiB per loader process": memory,
        "images/s": count / (time.perf_counter() - first),
    }


def main() -> None:
    """Measure both METHODS in turn."""
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2], Path(sys.argv[3]))))
        return
    rounds, found = parse_number(__doc__, "ROUNDS", 7), {one: [] for one in METHODS}
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder), PHOTOGRAPHS, 8)
        run = partial(subprocess.check_output, cwd=ROOT)
        words = [sys.executable, "-m", "benchmarks.loaders", "--measure"]
        for number in range(rounds + 1):
            for method in random.sample(METHODS, len(METHODS)):
                one = json.loads(run([*words, method, folder]))
                if number:  # the first round warms up
                    found[method].append(one)
    table = {method: {} for method in METHODS}
    for method, rows in found.items():
        for name in rows[0]:
            one = spread([row[name] for row in rows])
            text = "{median:.4g} ({low:.4g} to {high:.4g})".format(**one)
            table[method][name] = text
        print(method, table[method])
    write_results("loaders", {"rounds": rounds, "methods": table})


if __name__ == "__main__":
    main()
