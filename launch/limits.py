"""What loader processes need of their machine: shared memory and open files."""

import math
import mmap
import os
import resource
from argparse import Namespace

from common.device import usable_gpus
from common.errors import UserError

SHARED_MEMORY = "/dev/shm"  # where PyTorch puts what processes share
LOADERS = 2  # of a training process: training and validation
PREFETCH = 2  # batches that DataLoader asks of each worker ahead of time
SPARE_FILES = 64  # for what a communication library opens later


def check_limits(args: Namespace, train_images: int, val_images: int) -> None:
    """See that the batches on their way from loader processes find room.

    Each lies in two files in shared memory, which the training process has open. What
    is missing would show in the middle of an epoch, as a loader process that crashes.
    A limit on open files that this process may raise itself is raised.

    Args:
        args: with what share_out() sets.
        train_images: number of training images, 0 where there is no training.
        val_images: number of validation images.

    Raises:
        UserError: there is too little shared memory for all processes of this machine,
            or too few files may be open in this one.

    Source: https://docs.pytorch.org/docs/stable/multiprocessing.html#sharing-strategies
    """
    # The most images of an epoch in one process
    steps = train_images // args.global_batch_size
    most = steps * args.per_process_batch_size
    most = max(most, math.ceil(val_images / args.world_size))
    batch = min(args.per_process_batch_size, most)
    in_epoch = math.ceil(most / batch)
    # On a CPU the training process computes with one more, and still holds it when the
    # loader has handed it the next
    held = 0 if getattr(args, "device", "cpu") != "cpu" and usable_gpus() else 2

    images, labels = batch * 3 * args.image_size**2, batch * 8  # bytes

    def in_flight(workers: int) -> int:
        return min(PREFETCH * workers + held, in_epoch)

    def shared(workers: int) -> int:
        if not workers:
            return 0
        semaphores = LOADERS * (3 * workers + 8)  # of queues, a file each
        batches = in_flight(workers) * (pages(images) + pages(labels))
        return batches + semaphores * mmap.PAGESIZE

    processes = args.local_world_size
    workers, rest = divmod(args.workers, processes)
    needed = rest * shared(workers + 1) + (processes - rest) * shared(workers)
    check_shared_memory(needed, args.workers)
    workers = args.per_process_workers
    if workers:
        raise_open_files(workers, in_flight(workers))


def pages(size: int) -> int:
    """Bytes that a file of this many bytes takes in memory."""
    return math.ceil(size / mmap.PAGESIZE) * mmap.PAGESIZE


def check_shared_memory(needed: int, workers: int) -> None:
    """Raise a UserError where less than `needed` bytes are free."""
    free = free_shared_memory()
    if free is not None and free < needed:
        raise UserError(
            f"{SHARED_MEMORY} has {mib(free)} free, and batches from {workers} loader "
            f"processes take up to {mib(needed)}: make it larger (docker run "
            "--shm-size), or lower --workers"
        )


def free_shared_memory() -> int | None:
    """Bytes free in shared memory; None where there is no limit to see."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def raise_open_files(workers: int, batches: int) -> None:
    """Let this process open the files that its loader processes take.

    Args:
        workers: loader processes of each of its two loaders.
        batches: most batches in flight.

    Raises:
        UserError: its hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = open_files() + LOADERS * (2 + 4 * workers) + 2 * batches
    wanted = needed + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY:
        if hard < needed:
            raise UserError(
                f"this process may open {hard} files, and with {workers} loader "
                f"processes takes {needed}: raise the limit (ulimit -Hn), or lower "
                "--workers"
            )
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_files() -> int:
    """Number of files that this process has open."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def describe_limits() -> str:
    """What this machine allows, in words."""
    free = free_shared_memory()
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "any number of" if hard == resource.RLIM_INFINITY else max(files, hard)
    memory = f"{mib(free)} of shared memory free, " if free is not None else ""
    return f"{memory}{most} open files per process"


def mib(size: int) -> str:
    """Bytes in words: MiB, rounded."""
    return f"{size / 2**20:,.0f} MiB" if size >= 2**20 else f"{size / 2**10:,.0f} KiB"
