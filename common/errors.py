"""One-line errors, and which process prints them."""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading

# The environment variables in which launchers pass the local rank
LOCAL_RANK_VARIABLES = (
    "LOCAL_RANK",
    "HOROVOD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "SLURM_LOCALID",
)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # each asks a run to stop


class UserError(Exception):
    """An error that the user can fix. Its text is one line: what, where, what to do.

    Usually all processes raise the same error, and only the first process on each
    machine prints it. If only one process can raise it, `one_process_only` makes that
    process print it. The exit status is `status`; launchers do not restart after 2.
    """

    status = 2
    one_process_only = False


class ImageError(UserError):
    """An unusable image; only the process that loads the image raises this error."""

    one_process_only = True


def local_rank() -> str:
    """This process's local rank, from the launcher's environment variables."""
    found = (os.environ.get(name) for name in LOCAL_RANK_VARIABLES)
    return next((value for value in found if value is not None), "0")


def this_process() -> str:
    """This process's local rank and machine in words."""
    return f"process {local_rank()} on {socket.gethostname()}"


def speaks_for_machine() -> bool:
    """Whether this process is the first on its machine."""
    return local_rank() == "0"


def say(message: str) -> None:
    """Print one line to stderr, prefixed with the script's name."""
    line = " ".join(str(message).split())
    name = os.path.basename(sys.argv[0]) or "python"
    # One write call, so that lines from several processes do not mix
    sys.stderr.write(f"{name}: {line}\n")
    sys.stderr.flush()


def complain(message: str) -> None:
    """Print a one-line error to stderr."""
    say(f"error: {message}")


def forget_children() -> None:
    """Remove PyTorch's SIGCHLD handler, which raises if a loader process has died."""
    while signal.getsignal(signal.SIGCHLD) != signal.SIG_DFL:
        with contextlib.suppress(RuntimeError):  # one has just died
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def end_children() -> None:
    """Kill this process's loader processes, which ignore other signals."""
    if threading.current_thread() is threading.main_thread():
        forget_children()  # the handler runs only there
    for child in multiprocessing.active_children():
        child.kill()
