"""How a script ends: its exit status and the one line that explains it."""

import contextlib
import ctypes
import multiprocessing
import os
import re
import signal
import socket
import sys
import traceback
from collections.abc import Iterator

# The launchers' names for "which of this machine's processes am I"
LOCAL_RANK_VARIABLES = (
    "LOCAL_RANK",
    "HOROVOD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "SLURM_LOCALID",
)

# What Gloo, NCCL, TCPStore, Horovod and DataLoader say when another process, or one of
# the loader processes, is gone or silent. A GPU alone may time out too
LOST_PROCESS = re.compile(
    r"connection (was )?(closed|reset|refused|timed out)|broken pipe|failed to recv"
    r"|(operations?( have failed or)?|client socket|socket \S+) (has )?timed out"
    r"|timed out (waiting|connecting|after|in (monitoredBarrier|blocking))"
    r"|(connect|read|write|wait|socket|nccl|application|barrier|operation) timeout"
    r"|timeout waiting for key|nccl ?(remote|system|communicator)|unexpected status"
    r"|remote process exited"
    r"|horovod has been shut down|DataLoader worker \(pid",
    re.IGNORECASE,
)
PORT_IN_USE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)


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


class Stopped(Exception):
    """A signal asked for the end, and what was reached has been saved: the text."""


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


@contextlib.contextmanager
def exit_status(number: int | None = None) -> Iterator[None]:
    """Turn the end of a script into its exit status.

    0 done; 2 bad input or a missing dependency; 143 stopped by a signal after saving;
    130 interrupted before there was anything to save; 1 everything else. Where another
    process was lost this one says so in a line; what is left is a bug, and keeps its
    traceback. `number` is this process's on its machine, where no launcher put it into
    the environment.
    """
    end_with_launcher()
    if number is not None:
        os.environ["LOCAL_RANK"] = str(number)
    try:
        yield
    except UserError as error:
        if not error.said and (error.one_process_only or speaks_for_machine()):
            complain(str(error))
        leave(error.status)
    except Stopped as stop:
        if speaks_for_machine():
            say(f"stopped after {stop}, which is saved; --resume auto goes on from it")
        leave(143)
    except KeyboardInterrupt:
        leave(130)
    except Exception as error:
        forget_children()
        if PORT_IN_USE.search(str(error)):
            port = re.search(r"port: (\d+)", str(error))
            complain(f"port {port[1] if port else ''} is in use: choose another one")
            leave(2)
        # A loader process that dies also closes what it sends its batches through
        lost = isinstance(error, RuntimeError | ConnectionError)
        if not lost or not LOST_PROCESS.search(str(error)):
            traceback.print_exc()
            leave(1)
        complain(f"{this_process()} lost another: {told(error)}{hint(error)}")
        leave(1)


def told(error: Exception) -> str:
    """What a library says, without its own file names and good wishes."""
    line = str(error).strip().splitlines()[0]
    return re.sub(r"^\[\S+:\d+\] | This is typically caused by .*", "", line)


def hint(error: Exception) -> str:
    """What to do where a machine told the others its loopback address."""
    if "connectFullMesh" not in str(error) or "127.0." not in str(error):
        return ""
    return " (a host name leads to that address: set INTERFACE, see docs/multinode.md)"


def end_with_launcher() -> None:
    """Have torchrun's death end this process too, by SIGTERM, so that it saves before.

    torchrun starts each process in a session of its own; killed, it leaves them
    running. Our launch scripts tell their process id in LAUNCHER_PID: if that process
    died before this one asked for the signal, this one ends here.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        PR_SET_PDEATHSIG = 1  # https://man7.org/linux/man-pages/man2/prctl.2.html
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        launcher = os.environ.pop("LAUNCHER_PID", None)  # not for processes it starts
        if launcher not in (None, str(os.getppid())):
            os._exit(1)


def leave(status: int) -> None:
    """End this process now, with its loader workers.

    An ordinary exit would wait for threads of a communication library that itself waits
    for a process which is gone.
    """
    end_children()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


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
