"""The processes that multiprocessing_distributed.py starts itself."""

import contextlib
import logging
import signal
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

import torch.multiprocessing

from common.arguments import positive
from common.errors import SIGNALS, UserError, complain
from launch.check import processes_per_machine
from launch.machines import host_and_port, use_loopback


def add_spawn_flags(parser: ArgumentParser) -> None:
    """Add the flags for a script that starts its processes itself."""
    add = parser.add_argument
    add("--backend", choices=("nccl", "gloo"), help="nccl on GPUs, gloo on CPUs")
    add("--nprocs", type=positive, help="on this machine (one per GPU, or 2 on CPU)")
    add("--nnodes", type=positive, default=1, help="number of machines (%(default)s)")
    add("--node-rank", type=int, default=0, help="rank of this machine (%(default)s)")
    add("--dist-url", help="tcp://HOST:PORT on rank 0's machine (default: a file)")


def check_spawn_flags(args: Namespace) -> None:
    """Set --nprocs' default; raises UserError if the machines' flags conflict."""
    args.nprocs = args.nprocs or processes_per_machine(args.device)
    url, count = args.dist_url, args.nnodes
    if not 0 <= args.node_rank < count or count > 1 and not url:
        needed = "--dist-url and a --node-rank from 0 to N - 1"
        raise UserError(f"--nnodes N needs {needed}")
    if url:
        host_and_port(url.removeprefix("tcp://"), f"--dist-url {url}")


@contextlib.contextmanager
def rendezvous(args: Namespace) -> Iterator[str]:
    """Provide the URL at which the processes meet.

    On one machine, the default is a file, so no port is needed. On several machines,
    rank 0 waits at `--dist-url` for the others, up to --timeout-seconds.
    """
    if args.nnodes == 1:
        use_loopback()
    for number in SIGNALS:  # until wait_for() forwards them
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="rendezvous-") as folder:
        yield args.dist_url or f"file://{folder}/store"


def wait_for(children: torch.multiprocessing.ProcessContext) -> None:
    """Wait for the processes of torch.multiprocessing.spawn; exit with their status.

    This function forwards signals and keeps waiting, so that the children can save
    first. When one child fails, the others have 10 seconds to exit, then get SIGTERM,
    then SIGKILL.
    """
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)

    def forward(number: int, frame: object) -> None:
        for child in children.processes:
            child.terminate()

    for number in SIGNALS:
        signal.signal(number, forward)
    try:
        while not children.join(grace_period=10):
            pass
    except torch.multiprocessing.ProcessExitedException as error:
        if error.exit_code < 0:
            complain(str(error))
        sys.exit(error.exit_code if error.exit_code > 0 else 1)
