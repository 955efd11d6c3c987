"""Errors in one line, and which process says them."""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys

# The launchers' names for "which of this machine's processes am I"
LOCAL_RANK_VARIABLES = (
    "LOCAL_RANK",
    "HOROVOD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "SLURM_LOCALID",
)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # each asks for the end


class UserError(Exception):
    """Something the user can put right. The text is one line: what, where, what to do.

    Every process meets the same mistake, so only the first one of each machine prints
    it, unless `one_process_only` says that this process alone knows, or `said` that
    rank 0 has printed it for all. Nobody restarts what ended with status 2.
    """

    status = 2
    one_process_only = False
    said = False


class ImageError(UserError):
    """An image that cannot be read or used, met by the process that needed it."""

    one_process_only = True


class MissingMachine(UserError):
    """A machine did not come in time; the next time it may."""

    status = 1


def local_rank() -> str:
    """This process's number on its machine, by the launcher's variables."""
    found = (os.environ.get(name) for name in LOCAL_RANK_VARIABLES)
    return next((value for value in found if value is not None), "0")


def this_process() -> str:
    """Say which process this is."""
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
    """Take away PyTorch's handler, which raises where a loader process has died."""
    while signal.getsignal(signal.SIGCHLD) != signal.SIG_DFL:
        with contextlib.suppress(RuntimeError):  # it died just now
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def end_children() -> None:
    """Kill this process's loader processes.

    They ignore SIGTERM, so multiprocessing's own clean-up at exit would wait for ever
    for one that a traceback or a test still refers to.
    """
    forget_children()
    for child in multiprocessing.active_children():
        child.kill()
