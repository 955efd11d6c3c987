"""Who this process is, by a launcher's variables, and the signals that stop it."""

import logging
import multiprocessing.resource_tracker
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import torch.multiprocessing

from common.errors import UserError, complain, this_process


class Ranks(NamedTuple):
    """The four numbers that place a process in a job."""

    rank: int  # among all processes
    local_rank: int  # among the processes of this machine
    world_size: int  # number of processes
    local_world_size: int  # number of processes on this machine


def ranks_from_environment(environment: Mapping[str, str]) -> Ranks:
    """Read the ranks that torchrun or torch.distributed.launch hand down.

    Args:
        environment: os.environ, or a mapping like it.

    Raises:
        UserError: a variable is missing, no number, or out of range.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    missing = [name for name in names if name not in environment]
    if missing:
        raise UserError(
            "a launcher has to start this script, for example torchrun --standalone "
            f"--nproc-per-node=2 SCRIPT --data DIR (no {', '.join(missing)} in the "
            "environment)"
        )
    try:
        ranks = Ranks(*(int(environment[name]) for name in names))
    except ValueError:
        values = ", ".join(f"{name}={environment[name]}" for name in names)
        raise UserError(
            f"ranks from the launcher have to be numbers: {values}"
        ) from None
    if not (
        0 <= ranks.rank < ranks.world_size
        and 0 <= ranks.local_rank < ranks.local_world_size <= ranks.world_size
    ):
        values = ", ".join(f"{name}={environment[name]}" for name in names)
        raise UserError(f"ranks from the launcher contradict each other: {values}")
    return ranks


class Watchdog:
    """Remembers that a signal asked for the end, and ends a process that hangs.

    A signal only sets `stop_requested`, which the training loop reads where the sums
    are combined, so that all processes stop after the same step. Make the watchdog once
    training starts: until then a signal may end the process, there is nothing to save.

    Not every communication library gives up on a process that is gone silent (Horovod
    over MPI does not). So the watchdog ends this one where no batch is finished for
    `timeout`, and `GRACE` seconds more, in which a library may say what it knows; the
    first batch, which may compile, has three times as long. It counts seconds in which
    this process runs: one that was suspended goes on.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    GRACE = 5

    def __init__(self, timeout: timedelta):
        self.stop_requested = False
        self.limit = int(timeout.total_seconds()) + self.GRACE
        self.fed = False
        for number in self.SIGNALS:
            signal.signal(number, self._remember)
        threading.Thread(target=self._watch, daemon=True).start()

    def feed(self) -> None:
        """Say that a batch is finished."""
        self.fed = True

    def _remember(self, number: int, frame: object) -> None:
        self.stop_requested = True

    def _watch(self) -> None:
        seconds = -2 * self.limit
        while seconds < self.limit:
            time.sleep(1)
            seconds = 0 if self.fed else seconds + 1
            self.fed = False
        complain(
            f"{this_process()} finished no batch for {self.limit} s, another process "
            "or the data hangs (--timeout-seconds sets how long to wait)"
        )
        os._exit(1)


def use_fork_server() -> None:
    """Have loader processes forked by a server that is no copy of this process.

    Source:
    https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods
    """
    root = str(Path(__file__).resolve().parent.parent)
    # The server looks for modules there, wherever this process was started
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(["common.forkserver"])
    # The tracker removes what a process that ends at once leaves behind, and need not
    # say so. And SIGUSR1, which mpirun hands to a whole process group, is not for it.
    quiet = "ignore::UserWarning:multiprocessing.resource_tracker"
    warnings, os.environ["PYTHONWARNINGS"] = os.environ.get("PYTHONWARNINGS"), quiet
    handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    multiprocessing.resource_tracker.ensure_running()
    signal.signal(signal.SIGUSR1, handler)
    del os.environ["PYTHONWARNINGS"]
    if warnings is not None:
        os.environ["PYTHONWARNINGS"] = warnings


def rendezvous_address(url: str | None, node_rank: int) -> str:
    """Where rank 0 is to listen: `url`, or a free port of the loopback device.

    Raises:
        UserError: rank 0 is to listen on this machine, and the port is taken.
    """
    if url is None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            return f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or not port:
        raise UserError(f"--dist-url {url} is not of the form tcp://HOST:PORT")
    if node_rank == 0:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("", port))
            except OSError as error:
                raise UserError(
                    f"--dist-url {url}: {error.strerror}; choose another port"
                ) from None
    return url


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

    for number in Watchdog.SIGNALS:
        signal.signal(number, hand_on)
    try:
        while not children.join(grace_period=10):
            pass
    except torch.multiprocessing.ProcessExitedException as error:
        if error.exit_code < 0:
            complain(str(error))
        sys.exit(error.exit_code if error.exit_code > 0 else 1)
