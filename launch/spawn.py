"""The processes that multiprocessing_distributed.py starts itself."""

import atexit
import logging
import signal
import sys
import tempfile
from argparse import Namespace

import torch.multiprocessing

from common.errors import SIGNALS, complain
from launch.exits import leave
from launch.machines import host_and_port, use_loopback


def rendezvous(args: Namespace) -> str:
    """Return the rendezvous URL for multiprocessing_distributed.py.

    On one machine, the default is a file, so no port is needed. On several machines,
    rank 0 waits at `--dist-url` for the others, up to --timeout-seconds. Raises
    UserError if this URL is malformed.
    """
    if args.nnodes == 1:
        use_loopback()
    if args.dist_url is None:
        folder = tempfile.TemporaryDirectory(prefix="rendezvous-")
        atexit.register(folder.cleanup)

        def end(number: int, frame: object) -> None:
            folder.cleanup()
            leave(130)  # a normal exit would wait for the processes

        for number in SIGNALS:  # until wait_for() forwards them
            signal.signal(number, end)
        return f"file://{folder.name}/store"
    host_and_port(args.dist_url.removeprefix("tcp://"), f"--dist-url {args.dist_url}")
    return args.dist_url


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
