"""How a process ends: signals, the watchdog and the exit status."""

import atexit
import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta

from common.errors import (
    SIGNALS,
    UserError,
    complain,
    end_children,
    forget_children,
    say,
    speaks_for_machine,
    this_process,
)

# Messages from Gloo, NCCL, TCPStore, Horovod and DataLoader after another process or a
# loader process died or hung. The pattern skips CUDA's "the launch timed out"
LOST_PROCESS = re.compile(
    r"connection (was )?(closed|reset|refused|timed out)|broken pipe|failed to recv"
    r"|(operations?( have failed or)?|client socket|socket \S+) (has )?timed out"
    r"|timed out (waiting|connecting|after|in (monitoredBarrier|blocking))"
    r"|(connect|read|write|wait|socket|nccl|application|barrier|operation) timeout"
    r"|timeout waiting for key|nccl ?(remote|communicator)|unexpected status"
    r"|remote process exited"
    r"|horovod has been shut down|DataLoader worker \(pid|no route to host",
    re.IGNORECASE,
)
PORT_IN_USE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
SHARED_MEMORY_FULL = re.compile(r"(</torch_|/dev/shm/nccl-).*No space left on device")


class Stopped(Exception):
    """A signal stopped the run after a save; the text is the run's position."""


class Watchdog:
    """Records stop signals, and ends a process that hangs.

    A signal only sets `stop_requested`. The training loop reads it together with the
    metrics, so that all processes stop after the same step.

    Some communication libraries wait for a dead process without a timeout (Horovod over
    MPI does, and NCCL may). Therefore a thread ends this process, even if the main
    thread hangs, when no batch finishes within `timeout` plus `GRACE` seconds, which
    give a library time to report the reason. The first batch may take three times as
    long, because it may compile the model. Time spent suspended does not count.
    """

    GRACE = 5

    def __init__(self, timeout: timedelta, catch: bool = True):
        """Start watching; `catch` is False if there is nothing to save."""
        self.stop_requested = False
        self.limit = int(timeout.total_seconds()) + self.GRACE
        self.fed = False
        for number in SIGNALS if catch else ():
            signal.signal(number, self._remember)
        threading.Thread(target=self._watch, daemon=True).start()

    def feed(self) -> None:
        """Report that a batch is finished."""
        self.fed = True

    def _remember(self, number: int, frame: object) -> None:
        self.stop_requested = True

    def _watch(self) -> None:
        seconds = -2 * self.limit
        while seconds < self.limit:
            time.sleep(1)
            seconds += 1
            if self.fed:
                self.fed, seconds = False, 0
        complain(
            f"{this_process()} finished no batch for {self.limit} s: another process "
            "or data loading hangs (--timeout-seconds sets the limit)"
        )
        end_children()
        os._exit(1)


@contextlib.contextmanager
def exit_status(local_rank: int | None = None) -> Iterator[None]:
    """Exit with a status that tells how the script ended.

    0: done; 2: bad input or a missing dependency; 143: stopped by a signal and saved;
    130: interrupted with nothing to save; 1: everything else. If another process died,
    this process prints one line. Any other exception is a bug and prints a traceback.
    """
    end_with_launcher()
    if local_rank is not None:  # no launcher has set it
        os.environ["LOCAL_RANK"] = str(local_rank)
    try:
        yield
    except UserError as error:
        if error.one_process_only or speaks_for_machine():
            complain(str(error))
        leave(error.status)
    except Stopped as stop:
        if speaks_for_machine():
            say(f"stopped after {stop} and saved; resume with --resume auto")
        leave(143)
    except KeyboardInterrupt:
        leave(130)
    except Exception as error:
        forget_children()
        if PORT_IN_USE.search(str(error)):
            port = re.search(r"port: (\d+)", str(error))
            complain(f"port {port[1] if port else ''} is in use: choose another one")
            leave(2)
        if SHARED_MEMORY_FULL.search(str(error)):
            advice = "make it larger (docker run --shm-size), or lower --workers"
            complain(f"{this_process()}: /dev/shm is full: {advice}")
            leave(2)
        # A loader process that dies also closes its connection
        lost = isinstance(error, RuntimeError | ConnectionError)
        if not lost or not LOST_PROCESS.search(str(error)):
            traceback.print_exc()
        else:
            complain(f"{this_process()} lost another process: {told(error)}")
        leave(1)
    leave(0)


def told(error: Exception) -> str:
    """Return a library's message without its source location or advice."""
    line = str(error).strip().splitlines()[0]
    return re.sub(r"^\[\S+:\d+\] | This is typically caused by .*", "", line)


def end_with_launcher() -> None:
    """Make the kernel send SIGTERM when torchrun dies, so that this process saves.

    torchrun starts each process in its own session, so the processes would outlive a
    killed torchrun. Source: https://man7.org/linux/man-pages/man2/prctl.2.html
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def leave(status: int) -> None:
    """End this process and its loader processes immediately.

    A normal exit takes a second, because it frees every object one by one. After a
    failure, it would also wait for a communication library's threads, which may wait
    for a dead process.
    """
    if status == 0:
        atexit._run_exitfuncs()
    end_children()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
