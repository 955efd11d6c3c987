"""Chooses the training runs to compare, their common settings and their images."""

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torchvision.datasets.folder import find_classes

from benchmarks.comparison import KEEP_MEMORY, ROOT, gpu_names
from benchmarks.photographs import write_photographs
from benchmarks.timings.measure import Candidate
from benchmarks.timings.statistics import AGAIN
from common.errors import UserError
from common.model import best_precision

IMAGES = 64  # number of distinct images in the generated JPEG dataset
CLASSES = 1000  # as many as with random images, so both modes train the same model
STEPS = 400  # steps per epoch with the generated dataset


def complete(args: argparse.Namespace) -> None:
    """Choose settings that suit this machine, unless the command line sets them.

    `args.skipped` has a reason for each strategy that cannot be compared. Raises
    UserError if --data is not a dataset, or there are too few GPUs or strategies.
    """
    for part in ("train", "val") if args.data else ():
        try:
            if not any(args.data.glob(f"{part}[.-]*tar")):
                find_classes(args.data / part)
        except OSError as error:
            raise UserError(f"--data {args.data}: {error.strerror or error}") from None
    gpus = torch.cuda.device_count()
    if gpus and (args.processes or 0) > gpus:
        raise UserError(f"--processes {args.processes}: there are {gpus} GPUs")
    args.device = "cuda" if gpus else "cpu"
    cores = len(os.sched_getaffinity(0))
    args.processes = args.processes or gpus or min(2, cores)
    args.threads = max(1, cores // args.processes)  # compute threads per process
    args.workers = min(4, args.threads)  # loader processes per process
    args.arch = args.arch or ("resnet50" if gpus else "resnet18")
    args.image_size = args.image_size or (224 if gpus else 64)
    args.batch_size = args.batch_size or (64 if gpus else 32)
    cpu = torch.device("cpu")
    args.precision = args.precision or ("fp16" if gpus else best_precision(cpu))
    args.interval = 10 if gpus else 2
    args.skipped = {n: why for n, why in skipped(args).items() if n in args.strategies}
    args.strategies = [name for name in args.strategies if name not in args.skipped]
    if not args.strategies:
        reasons = "; ".join(f"{name} {why}" for name, why in args.skipped.items())
        raise UserError(f"no strategy can be timed: {reasons}")
    # On a CPU, DataParallel is one process with all threads, so it gets no verdict
    args.shown = [n for n in args.strategies if n == "dataparallel" and not gpus]
    judged = [n for n in args.strategies if n not in args.shown] or args.strategies
    args.base = "distributed" if "distributed" in judged else judged[0]


def skipped(args: argparse.Namespace) -> dict[str, str]:
    """Return the strategies that cannot run here with args.precision, and why."""
    found = {}
    if args.device == "cpu":
        found["apex_distributed"] = "it needs a CUDA GPU"
    elif args.precision == "bf16":
        found["apex_distributed"] = "it has no bf16"
        if args.processes > 1:
            found["dataparallel"] = "its threads have no bf16"
    if problem := os.environ.get("HOROVOD_PROBLEM"):  # scripts/setup.sh sets it
        found["horovod_distributed"] = problem
    return found


def candidate(
    args: argparse.Namespace,
    strategy: str,
    mode: str,
    name: str | None = None,
    size: tuple[int, int] | None = None,
) -> Candidate:
    """Return the candidate that trains with a strategy in a mode.

    `size` is (processes, images per process); by default, it comes from `args`.
    """
    processes, share = size or (args.processes, args.batch_size)
    batch, alone = processes * share, strategy == "dataparallel"
    flags = ["--data", args.data]
    if mode == "synthetic":
        flags = ["--synthetic", batch * 10**4]
    flags += ["--arch", args.arch, "--image-size", args.image_size]
    flags += ["--global-batch-size", batch, "--print-interval", args.interval]
    # All strategies have the same total number of workers
    flags += ["--workers", args.workers * (processes if alone else 1)]
    flags += ["--save-minutes", 10**6]  # never save
    if strategy == "apex_distributed":
        flags += ["--opt-level", "O1" if args.precision == "fp16" else "O0"]
    else:
        flags += ["--precision", args.precision]
    threads = args.threads * (processes if alone else 1)
    variables = {"OMP_NUM_THREADS": str(threads), "NPROC": str(processes)}
    words = ["bash", ROOT / "scripts" / f"{strategy}.sh", *flags]
    found = Candidate(name or strategy, [*map(str, words)], variables)
    if args.device == "cpu":
        variables |= KEEP_MEMORY
        pinned = args.processes * args.threads == len(os.sched_getaffinity(0))
        return found._replace(cores=threads * pinned)
    variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_names()[:processes])
    return found


def candidates(args: argparse.Namespace, mode: str) -> list[Candidate]:
    """Return a mode's candidates, and a second copy of one to check the method with."""
    if mode != "scaling":
        found = [candidate(args, strategy, mode) for strategy in args.strategies]
        return [*found, candidate(args, args.base, mode, args.base + AGAIN)]
    most, each = args.processes, args.batch_size
    counts = [2**n for n in range(most.bit_length()) if 2**n < most] + [most]
    sizes = [(n, each) for n in counts]  # the same batch per device; below: in total
    sizes += [(n, each * most // n) for n in counts if not each * most % n]
    named = {f"{n} x {share}": (n, share) for n, share in sizes}
    named[f"{most} x {each}{AGAIN}"] = (most, each)
    return [candidate(args, args.base, "synthetic", *one) for one in named.items()]


@contextmanager
def images(args: argparse.Namespace) -> Iterator[Path]:
    """Yield a folder of JPEG files: the user's, or links to a few generated files."""
    if args.data or "jpeg" not in args.modes:
        yield args.data
        return
    with tempfile.TemporaryDirectory(prefix="images-") as name:
        folder = Path(name)
        write_photographs(folder / "different", train=IMAGES, val=0)
        files = sorted(folder.glob("different/train/*/*"))
        for one in range(CLASSES):
            for part in ("train", "val"):
                (folder / part / f"{one:03d}").mkdir(parents=True)
            os.link(files[one % IMAGES], folder / "val" / f"{one:03d}" / "0.JPEG")
        for one in range(max(CLASSES, args.batch_size * args.processes * STEPS)):
            name = f"train/{one % CLASSES:03d}/{one}.JPEG"
            os.link(files[one % IMAGES], folder / name)
        yield folder
