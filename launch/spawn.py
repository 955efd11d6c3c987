"""The processes that multiprocessing_distributed.py starts itself."""

import atexit
import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch.multiprocessing

from common.device import device_and_backend
from common.errors import SIGNALS, UserError, complain
from launch.machines import Machines, check_address, join_seconds, meet, use_loopback


def rendezvous(args: Namespace, make_store: Callable[..., Any]) -> str:
    """Where the processes of multiprocessing_distributed.py are to meet.

    On a single machine that is a file, so that nothing listens for it; on several it
    is `--dist-url`, once the machines have seen that they were started alike.

    Args:
        args: with dist_url, nnodes, node_rank, nprocs.
        make_store: torch.distributed.TCPStore.

    Raises:
        UserError: a malformed address, a port that is taken, or see meet().
    """
    if args.dist_url is None:
        use_loopback()
        file, path = tempfile.mkstemp(prefix="rendezvous-")
        os.close(file)
        os.unlink(path)  # FileStore makes it
        atexit.register(_remove, path)
        return f"file://{path}"
    host, port = check_address(args.dist_url, args.node_rank)
    if args.nnodes == 1:
        use_loopback()
    else:
        seconds = join_seconds(os.environ)
        machines = Machines(args.nnodes, args.node_rank, f"{host}:{port}", 0, seconds)
        facts = {"--nnodes": args.nnodes, "--nprocs": args.nprocs}
        facts["backend"] = device_and_backend(args)
        store = meet(make_store, machines, {**facts, "NODE_RANK": args.node_rank})
        # The port is then rank 0's, so it has to be free again
        store.add("met", 1)
        until = time.monotonic() + seconds
        while args.node_rank == 0 and store.add("met", 0) < args.nnodes:
            if time.monotonic() > until:
                raise UserError(f"a machine left while all met at {args.dist_url}")
            time.sleep(0.1)
    return args.dist_url


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def wait_for(children: torch.multiprocessing.ProcessContext) -> None:
    """Wait for the processes of torch.multiprocessing.spawn, and end as they end.

    Signals are handed on, so that the children can save and this process outlives them:
    left to itself it would die or hang and leave them behind. When one child fails, the
    others get 10 seconds to notice by themselves, then SIGTERM, then SIGKILL.
    """

    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)

    def hand_on(number: int, frame: object) -> None:
        for child in children.processes:
            child.terminate()

    for number in SIGNALS:
        signal.signal(number, hand_on)
    try:
        while not children.join(grace_period=10):
            pass
    except torch.multiprocessing.ProcessExitedException as error:
        if error.exit_code < 0:
            complain(str(error))
        sys.exit(error.exit_code if error.exit_code > 0 else 1)
