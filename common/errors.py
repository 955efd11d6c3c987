"""Errors that print one line, and the process that prints it."""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading

# The names that launchers give to this process's number on its machine
LOCAL_RANK_VARIABLES = (
    "LOCAL_RANK",
    "HOROVOD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "SLURM_LOCALID",
)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # each asks a run to stop


class UserError(Exception):
    """A mistake that the user can fix. The text is one line: what, where, what to do.

    Every process meets the same mistake, so only the first one of each machine prints
    it, unless `one_process_only` is set because no other process meets it. The exit
    status is `status`; after 2, our launchers do not restart the job.
    """

    status = 2
    one_process_only = False


class ImageError(UserError):
    """An image that cannot be read or used; only the process that loads it knows."""

    one_process_only = True


def local_rank() -> str:
    """This process's number on its machine, from the launcher's variables."""
    found = (os.environ.get(name) for name in LOCAL_RANK_VARIABLES)
    return next((value for value in found if value is not None), "0")


def this_process() -> str:
    """This process's number and machine, in words."""
    return f"process {local_rank()} on {socket.gethostname()}"


def speaks_for_machine() -> bool:
    """Whether this process is the first of its machine."""
    return local_rank() == "0"


def say(message: str) -> None:
    """Print one line to stderr, with the script's name in front."""
    line = " ".join(str(message).split())
    name = os.path.basename(sys.argv[0]) or "python"
    # One write call, so that lines of several processes do not mix
    sys.stderr.write(f"{name}: {line}\n")
    sys.stderr.flush()


def complain(message: str) -> None:
    """Print an error in one line to stderr."""
    say(f"error: {message}")


def forget_children() -> None:
    """Remove PyTorch's SIGCHLD handler, which raises if a loader process has died."""
    while signal.getsignal(signal.SIGCHLD) != signal.SIG_DFL:
        with contextlib.suppress(RuntimeError):  # one died at this moment
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def end_children() -> None:
    """Kill this process's loader processes: which ignore gentler signals."""
    if threading.current_thread() is threading.main_thread():
        forget_children()  # the handler runs there alone
    for child in multiprocessing.active_children():
        child.kill()
