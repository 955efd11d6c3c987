"""Compare the speed of two checkouts of this project, measured alternately.

    python -m benchmarks.worktrees OLD NEW [ROUNDS]

The benchmark prints median ratios with quartiles for the input pipeline (one process),
training at 64 px (two CPU processes), and launches that train for one step.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.comparison import KEEP_MEMORY, compare
from benchmarks.input import TRAIN, arguments
from benchmarks.photographs import write_photographs
from common.images import choose_decoder
from launch.exits import exit_status

# This code runs in each checkout
INPUT = """
import sys, time
from argparse import Namespace
from common.data import SeededDataset, build_datasets
train_set = SeededDataset(build_datasets(Namespace(**eval(sys.argv[1])))[0], 0)
for epoch in range(2):
    began = time.perf_counter()
    for index in range(len(train_set.dataset)):
        train_set[epoch, index]
print(len(train_set.dataset) / (time.perf_counter() - began))
"""


def environment(checkout: Path) -> dict[str, str]:
    """Return the environment for two processes with one thread each."""
    variables = {"PYTHON": sys.executable, "NPROC": "2", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **KEEP_MEMORY, **variables, "PYTHONPATH": str(checkout)}


def images_per_second(checkout: Path, data: Path) -> float:
    """Measure the input pipeline."""
    values = str(vars(arguments(data, choose_decoder("auto"))))
    command = [sys.executable, "-c", INPUT, values]
    options = {"cwd": checkout, "env": environment(checkout)}
    return float(subprocess.check_output(command, **options))


def launch(checkout: Path, *flags: object) -> tuple[float, dict]:
    """Return launches per minute, and the last epoch's record."""
    with tempfile.TemporaryDirectory() as output:
        command = ["bash", checkout / "scripts" / "distributed.sh", *flags]
        command += ["-b", 64, "--image-size", 64, "--device", "cpu", "--output", output]
        began = time.monotonic()
        subprocess.run(
            list(map(str, command)),
            check=True,
            cwd=checkout,
            env=environment(checkout),
            stdout=subprocess.DEVNULL,
        )
        minutes = (time.monotonic() - began) / 60
        records = Path(output, "epochs.jsonl").read_text().splitlines()
        return 1 / minutes, json.loads(records[-1])


def main() -> None:
    """Measure both checkouts."""
    checkouts = [Path(path).resolve() for path in sys.argv[1:3]]
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 10
    steps = ("--synthetic", 64 * 60, "--epochs", 1)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        write_photographs(data, TRAIN, 16)
        start = ("--data", data, "--epochs", 1, "--max-steps", 1, "--print-interval", 1)
        measures = {
            "input": lambda one: images_per_second(one, data),
            "step": lambda one: launch(one, *steps)[1]["images_per_second"],
            "start-up": lambda one: launch(one, *start)[0],
        }
        for title, measure in measures.items():
            works = {str(one): partial(measure, one) for one in checkouts}
            unit = "launches/min" if title == "start-up" else "images/s"
            compare(title, works, rounds, unit)


if __name__ == "__main__":
    with exit_status():
        main()
