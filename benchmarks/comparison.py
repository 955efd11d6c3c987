"""Measure candidates in turn, compare them and write the results.

The speed of a shared machine drifts, so a ratio is meaningful only if both measurements
were made at nearly the same time. Each round measures every candidate once, in random
order, and each ratio compares two measurements from the same round.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torchvision

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

# By default, glibc returns thousands of freed pages to the system in each step, which
# takes 10 to 20 % of a step, depending on what else is in memory. This would distort
# any comparison. These settings make glibc keep the pages.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_TOP_PAD_": str(2**28),
}


def parse_number(document: str, name: str, default: int) -> int:
    """Parse the command line of a benchmark whose only argument is a number."""
    parser = argparse.ArgumentParser(description=document.splitlines()[0])
    parser.add_argument(name, nargs="?", type=int, default=default)
    return vars(parser.parse_args())[name]


def commit() -> str | None:
    """Return the commit (with -dirty if files are modified), or None outside git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return found.stdout.strip() or None


def describe(device: torch.device) -> str:
    """Return the device's product name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.cpu.get_capabilities().get("cpu_name") or "CPU"


def gpu_names() -> list[str]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES, or all GPUs if it is not set."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return names if names[0] else [str(one) for one in range(torch.cuda.device_count())]


def pin_core() -> set[int]:
    """Pin this process to one core; return the cores that it could use before."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    torch.set_num_threads(1)
    return cores


def speed(work: Callable, items: Sequence) -> Callable[[], float]:
    """Return a function that measures how many items `work` handles per CPU-second."""

    def measure() -> float:
        began = time.process_time()  # CPU time: other programs hardly affect it
        deque(map(work, items), maxlen=0)  # discards the results
        return len(items) / (time.process_time() - began)

    return measure


def interleave(
    candidates: dict[str, Callable[[], float]], rounds: int
) -> dict[str, list[float]]:
    """Measure each candidate once per round.

    Args:
        candidates: functions that do the work and return a measurement.
        rounds: number of rounds after a first warm-up round, which is discarded.

    Returns:
        The measurements of each candidate, in the order of the rounds.
    """
    found: dict[str, list[float]] = {name: [] for name in candidates}
    order = random.Random(0)
    for index in range(rounds + 1):
        for name in order.sample(list(candidates), len(candidates)):
            measured = candidates[name]()
            if index:
                found[name].append(measured)
        print(f"\r  round {index}/{rounds}", end="", file=sys.stderr, flush=True)
    print("\r" + " " * 20 + "\r", end="", file=sys.stderr, flush=True)
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Return the median and the quartiles of `values`."""
    values = values * 2 if len(values) == 1 else values
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def compared(found: dict[str, list[float]], baseline: str) -> dict[str, dict]:
    """Summarize each candidate's measurements, and their ratios to the baseline's."""
    rows = {}
    for name, values in found.items():
        ratios = [x / base for x, base in zip(values, found[baseline], strict=True)]
        rows[name] = {"value": spread(values), "ratio": spread(ratios)}
    return rows


def print_rows(title: str, unit: str, rows: dict[str, dict]) -> None:
    """Print a table of medians, and of ratios with their quartiles."""
    print(f"\n{title}\n{'':44}{unit:>12}{'ratio':>8}   quartiles")
    for name, row in rows.items():
        ratio = row["ratio"]
        print(
            f"{name:44}{row['value']['median']:12.1f}{ratio['median']:8.2f}   "
            f"{ratio['low']:.2f} to {ratio['high']:.2f}",
            flush=True,
        )


def compare(
    title: str, works: dict[str, Callable], rounds: int, unit: str = "images/s"
) -> dict[str, dict]:
    """Measure `works` and compare each with the first; print and return the results."""
    rows = compared(interleave(works, rounds), next(iter(works)))
    print_rows(title, unit, rows)
    return rows


def write_results(name: str, results: dict) -> None:
    """Write results, the hardware and the versions to benchmarks/results/NAME.json."""
    report = {
        "argv": ["python", "-m", f"benchmarks.{name}", *sys.argv[1:]],
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "cpu": describe(torch.device("cpu")),
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        **results,
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwritten to {path}")
