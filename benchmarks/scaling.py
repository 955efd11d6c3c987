"""What to expect of more GPUs, and how far the model behind it is off here.

    python -m benchmarks.scaling [ROUNDS]
    python -m benchmarks.scaling --step-milliseconds 100 --parameters 25.6e6

The first form checks the model on this machine: it trains a small network in 1 to 4 CPU
processes, takes alpha and beta from all-reduces between two of them, and predicts the
steps of the others. Prints the errors and writes results/scaling.json.
`python docs/make.py` then puts them into docs/scaling.md.

The second form prints the table for your own model and machines.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comparison import interleave, spread, write_results
from benchmarks.scaling_model import (
    MIB,
    Cluster,
    Link,
    Range,
    buckets,
    fit,
    ring_seconds,
    step_seconds,
)
from common.errors import UserError, exit_status
from launch.machines import use_loopback

# What NCCL reckons with for a ring: microseconds a message, in
# https://github.com/NVIDIA/nccl/blob/b6475625fbcaa2c3c0e50eed2fa1255d7514d4a2/src/graph/tuning.cc
NVLINK_ALPHA, PCI_ALPHA, NETWORK_ALPHA = 3.4e-6, 5.7e-6, 14e-6
# and the most bytes per second that it expects of eight A100 through NVLink, in
# https://github.com/NVIDIA/nccl/blob/01afd20a77b5804e0ecf1042509dd9d20ebf9e93/src/graph/tuning.cc
A100_NVLINK = 235e9
GPUS = (2, 4, 8, 16, 64, 256, 512, 1024)

# --- the check on this machine ---

PROCESSES = 4
ARCH, SIZE, BATCH = "resnet18", 64, 8  # network, pixels, images per process
STEPS = 3  # of a measurement
# Bytes that alpha and beta are taken from, and how often a measurement sends them
SIZES = {2**14: 100, 2**17: 50, MIB: 20, 4 * MIB: 10, 16 * MIB: 4}


# What is measured: a step of processes that compute at once and do not talk, and one
# that DDP averages the gradients of
COMPUTE, STEP = "compute", "step"


def named(what: str, processes: int) -> str:
    """Name of a measurement."""
    return f"{what}, {processes} processes"


def all_reduce_name(size: int) -> str:
    """What is measured: an all-reduce."""
    return f"all-reduce of {size} bytes"


def parameters_bytes() -> int:
    """Bytes of the gradients of the network that is trained here."""
    model = torchvision.models.get_model(ARCH)
    return sum(4 * parameter.numel() for parameter in model.parameters())


def timed(
    work: Callable[[], None], repeats: int, group: dist.ProcessGroup
) -> Callable[[], float]:
    """Measures seconds of one work() that all processes of the group do."""

    def measure() -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        dist.barrier(group)
        return (time.perf_counter() - began) / repeats

    return measure


def training(group: dist.ProcessGroup, what: str) -> Callable[[], None]:
    """A step of fp32 training: COMPUTE or STEP."""
    torch.manual_seed(0)
    raw_model = torchvision.models.get_model(ARCH)
    model = DistributedDataParallel(
        raw_model, process_group=group, gradient_as_bucket_view=True
    )
    model.broadcast_buffers = False
    optimizer = torch.optim.SGD(raw_model.parameters(), 1e-3, 0.9)
    images, labels = torch.randn(BATCH, 3, SIZE, SIZE), torch.randint(1000, (BATCH,))

    def step() -> None:
        with contextlib.nullcontext() if what == STEP else model.no_sync():
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
        optimizer.step()

    return step


def all_reducing(group: dist.ProcessGroup, size: int) -> Callable[[], None]:
    """An all-reduce of `size` bytes."""
    vector = torch.zeros(size // 4)
    return lambda: dist.all_reduce(vector, group=group)


def measurements(
    processes: int, group: dist.ProcessGroup, takes_part: bool
) -> dict[str, Callable[[], float]]:
    """Everything that is measured with this number of processes."""
    sizes = {} if processes == 1 else {parameters_bytes(): 3}
    sizes |= SIZES if processes == 2 else {}
    works = {
        what: (STEPS, lambda what=what: training(group, what))
        for what in (COMPUTE, STEP)
    } | {
        all_reduce_name(size): (repeats, lambda size=size: all_reducing(group, size))
        for size, repeats in sizes.items()
    }
    return {
        named(what, processes): timed(make(), repeats, group) if takes_part else idle
        for what, (repeats, make) in works.items()
    }


def idle() -> float:
    """What a process does that a measurement is not about."""
    dist.barrier()
    return 0.0


def process(rank: int, rounds: int, folder: str) -> None:
    """One of the processes: everything in turns."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=PROCESSES
    )
    candidates = {}
    for processes in range(1, PROCESSES + 1):
        group = dist.new_group(range(processes))
        candidates |= measurements(processes, group, rank < processes)
    with contextlib.ExitStack() as stack:
        if rank:  # one progress line is enough
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        found = interleave(candidates, rounds)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(rounds: int) -> dict:
    """Start the processes and collect what the first one measured."""
    os.environ["OMP_NUM_THREADS"] = "1"
    use_loopback()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(process, (rounds, folder), nprocs=PROCESSES)
        found = json.loads(Path(folder, "found.json").read_text())
    size = parameters_bytes()
    setup = {"arch": ARCH, "image_size": SIZE, "images_per_process": BATCH}
    setup |= {"precision": "fp32", "steps": STEPS, "gradient_bytes": size}
    return {"rounds": rounds, **setup, "seconds": found}


def fitted(report: dict) -> Link:
    """Alpha and beta between two processes, from the medians."""
    sizes = [*SIZES, report["gradient_bytes"]]
    seconds = [
        spread(report["seconds"][named(all_reduce_name(size), 2)])["median"]
        for size in sizes
    ]
    return fit(2, sizes, seconds)


def checked(report: dict) -> dict[int, dict]:
    """For each number of processes: what was measured, predicted, and the error.

    Errors are predicted / measured - 1, for each round, as median and quartiles. The
    prediction takes the round's computation; only the communication is from the model.
    """
    link, size = fitted(report), report["gradient_bytes"]
    rows = {}
    for processes in range(1, PROCESSES + 1):
        compute, step = (
            report["seconds"][named(what, processes)] for what in (COMPUTE, STEP)
        )
        ring = ring_seconds(processes, size, link, buckets(size))
        row = {"compute": spread(compute), "step": spread(step), "ring": ring}
        if processes > 1:
            alone = report["seconds"][named(all_reduce_name(size), processes)]
            row["all_reduce"] = spread(alone)
        for index, name in enumerate(("nothing hidden", "all hidden")):
            predicted = [step_seconds(one, ring)[index] for one in compute]
            ratios = [a / b - 1 for a, b in zip(predicted, step, strict=True)]
            row[name] = {"seconds": spread(predicted), "error": spread(ratios)}
        rows[processes] = row
    return rows


def rows(report: dict) -> list[dict[str, object]]:
    """The table of errors; times are in milliseconds."""
    table = []
    for processes, row in checked(report).items():
        alone = row.get("all_reduce", {"median": 0.0})["median"]
        table.append(
            {
                "processes": processes,
                "compute": 1e3 * row["compute"]["median"],
                "all-reduce": 1e3 * alone,
                "by the model": 1e3 * row["ring"],
                "DDP step": 1e3 * row["step"]["median"],
            }
        )
        for end in ("nothing hidden", "all hidden"):
            error = "{median:+.0%} ({low:+.0%} to {high:+.0%})".format(
                **row[end]["error"]
            )
            table[-1][f"error, {end}"] = error.replace("%", " %")
    return table


def print_check(report: dict) -> None:
    """Print the table of errors."""
    print("\nmilliseconds, and errors of the predicted step with quartiles")
    for row in report["check"]:
        values = row.items()
        print(
            ", ".join(f"{k} {v:.0f}" if k[0] != "e" else f"{k} {v}" for k, v in values)
        )


# --- the reader's own table ---


def times(factor: Range, gpus: int) -> str:
    """How many times as fast as one GPU."""
    low, high = (f"{share * gpus:,.{1 if gpus < 10 else 0}f}" for share in factor)
    return low if low == high else f"{low} to {high}"


def print_table(cluster: Cluster, global_batch: int) -> None:
    """What to expect, from one GPU to 1,024."""
    header = ("GPUs", "all-reduce", f"{cluster.images} images per GPU")
    print(
        "times as fast as one GPU: nothing of the all-reduce hidden, to all that fits"
    )
    print("{:>6}{:>14}{:>24}{:>24}".format(*header, f"{global_batch} images in all"))
    per_host = cluster.gpus_per_host
    counts = {gpus for gpus in (1, 2, 4) if gpus < per_host}
    counts |= {per_host * 2**power for power in range(11)}
    for gpus in sorted(count for count in counts if count <= 1024):
        weak = times(cluster.weak(gpus), gpus)
        strong = times(cluster.strong(gpus, global_batch), gpus)
        milliseconds = f"{cluster.all_reduce(gpus) * 1e3:.1f} ms"
        strong = strong if gpus <= global_batch else "-"
        print(f"{gpus:6}{milliseconds:>14}{weak:>24}{strong:>24}")


def positive(text: str) -> float:
    """Parse a number above zero."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def count(text: str) -> int:
    """Parse a whole number above zero."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> None:
        """Raise what exit_status prints."""
        raise UserError(f"{message}; --help names all flags")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(
        prog="python -m benchmarks.scaling",
        allow_abbrev=False,
        description="Check the model of scaling here, or print it for your GPUs.",
    )
    parser.add_argument("rounds", nargs="?", type=count, metavar="ROUNDS", help="(9)")
    add = parser.add_argument
    add(
        "--step-milliseconds", type=positive, help="a step on one GPU: prints the table"
    )
    add("--images-per-gpu", type=count, default=256, help="of that step (256)")
    add("--global-batch-size", type=count, default=8192, help="kept fixed (8192)")
    add("--parameters", type=positive, default=25.6e6, help="of the model (25.6e6)")
    add("--gradient-bytes", type=count, default=4, help="of one parameter's (4)")
    add("--gpus-per-host", type=count, default=8, help="(8)")
    add("--link-gigabytes", type=positive, default=A100_NVLINK / 1e9, help="GB/s (235)")
    add("--network-gigabits", type=positive, default=100, help="Gbit/s a host (100)")
    add("--network-microseconds", type=positive, default=14, help="a message (14)")
    return parser.parse_args(argv)


def cluster_of(args: argparse.Namespace) -> Cluster:
    """What the flags describe."""
    return Cluster(
        step=args.step_milliseconds / 1e3,
        images=args.images_per_gpu,
        size=args.parameters * args.gradient_bytes,
        gpus_per_host=args.gpus_per_host,
        inside=Link(NVLINK_ALPHA, args.link_gigabytes * 1e9),
        network=Link(args.network_microseconds / 1e6, args.network_gigabits / 8 * 1e9),
    )


def main() -> None:
    """Measure, or print the table."""
    args = arguments()
    if args.step_milliseconds:
        if args.rounds:
            raise UserError("ROUNDS does not go with --step-milliseconds")
        print_table(cluster_of(args), args.global_batch_size)
        return
    if any(word.startswith("-") for word in sys.argv[1:]):
        raise UserError("a table for your GPUs needs --step-milliseconds")
    report = measure(args.rounds or 9)
    link = fitted(report)
    report["alpha_ms"], report["beta_gb_per_s"] = link.alpha * 1e3, link.beta / 1e9
    report["check"] = rows(report)
    print_check(report)
    write_results("scaling", report)


if __name__ == "__main__":
    with exit_status():
        main()
