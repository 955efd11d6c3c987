"""How a process ends: by a signal, by its watchdog, and with which exit status."""

import contextlib
import ctypes
import os
import re
import select
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

# Messages of Gloo, NCCL, TCPStore, Horovod and DataLoader when another process or a
# loader process died or hangs. A single GPU can time out too
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


class Stopped(Exception):
    """A signal asked the run to stop, and it was saved; the text is its position."""


class Watchdog:
    """Remembers that a signal asked the run to stop, and ends a process that hangs.

    A signal only sets `stop_requested`. The training loop reads it when the sums are
    added up, so that all processes stop after the same step.

    Not every communication library gives up on a process that does not answer (Horovod
    over MPI does not, and a GPU may wait in NCCL for a dead process). So a thread ends
    this process, whatever its main thread waits for:

    - if it finishes no batch within `timeout` plus `GRACE` seconds, in which a library
      may report the reason. The first batch, which may compile, may take three times
      as long. Time in which the process is suspended does not count.
    - at a second signal, `PATIENCE` seconds or more after the first, if it finished no
      batch between the two.
    """

    GRACE = 5
    PATIENCE = 2  # launchers pass one Ctrl-C on several times

    def __init__(self, timeout: timedelta, catch: bool = True):
        """Start to watch.

        Args:
            timeout: the longest time without a batch.
            catch: whether to handle signals; False if there is nothing to save.
        """
        self.stop_requested = False
        self.limit = int(timeout.total_seconds()) + self.GRACE
        self.fed = False
        # Python runs handlers in the main thread, which may hang; any thread fills this
        arrived, written = os.pipe()
        if catch:
            os.set_blocking(written, False)
            for number in SIGNALS:
                signal.signal(number, self._remember)
            signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(arrived,), daemon=True).start()

    def feed(self) -> None:
        """Report that a batch is finished."""
        self.fed = True

    def _remember(self, number: int, frame: object) -> None:
        self.stop_requested = True

    def _watch(self, arrived: int) -> None:
        seconds, asked = -2 * self.limit, None
        while seconds < self.limit:
            signals = []
            if select.select([arrived], [], [], 1)[0]:
                signals = [n for n in os.read(arrived, 64) if n in SIGNALS]
            else:
                seconds += 1
            if self.fed:
                self.fed, seconds, asked = False, 0, None
            if signals and asked is None:
                asked = time.monotonic()
            elif signals and time.monotonic() - asked > self.PATIENCE:
                complain(f"{this_process()} finished no batch between two signals")
                end_children()
                os._exit(1)
        complain(
            f"{this_process()} finished no batch for {self.limit} s: another process "
            "or the data loading hangs (--timeout-seconds sets the limit)"
        )
        end_children()
        os._exit(1)


@contextlib.contextmanager
def exit_status(number: int | None = None) -> Iterator[None]:
    """Turn the end of a script into its exit status.

    0 done; 2 bad input or a missing dependency; 143 stopped by a signal after saving;
    130 interrupted before there was anything to save; 1 everything else. If another
    process died, this one reports it in one line; any other exception is a bug and
    keeps its traceback.

    Args:
        number: the local rank, if no launcher put it into the environment.
    """
    end_with_launcher()
    if number is not None:
        os.environ["LOCAL_RANK"] = str(number)
    try:
        yield
    except UserError as error:
        if error.one_process_only or speaks_for_machine():
            complain(str(error))
        leave(error.status)
    except Stopped as stop:
        if speaks_for_machine():
            say(f"stopped after {stop}, which is saved; resume with --resume auto")
        leave(143)
    except KeyboardInterrupt:
        leave(130)
    except Exception as error:
        forget_children()
        if PORT_IN_USE.search(str(error)):
            port = re.search(r"port: (\d+)", str(error))
            complain(f"port {port[1] if port else ''} is in use: choose another one")
            leave(2)
        # A loader process that dies also closes the connection for its batches
        lost = isinstance(error, RuntimeError | ConnectionError)
        if not lost or not LOST_PROCESS.search(str(error)):
            traceback.print_exc()
        else:
            complain(f"{this_process()} lost another: {told(error)}")
        leave(1)


def told(error: Exception) -> str:
    """A library's message, without its source location and advice."""
    line = str(error).strip().splitlines()[0]
    return re.sub(r"^\[\S+:\d+\] | This is typically caused by .*", "", line)


def end_with_launcher() -> None:
    """Make the kernel send this process SIGTERM when torchrun dies, so that it saves.

    torchrun starts each process in its own session, so they keep running if torchrun is
    killed. Our launch scripts put their process id into LAUNCHER_PID: if that process
    died before this one asked for the signal, this one ends here.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        PR_SET_PDEATHSIG = 1  # https://man7.org/linux/man-pages/man2/prctl.2.html
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        launcher = os.environ.pop("LAUNCHER_PID", None)  # not for its children
        if launcher not in (None, str(os.getppid())):
            os._exit(1)


def leave(status: int) -> None:
    """End this process now, with its loader processes.

    An ordinary exit would wait for threads of a communication library that itself waits
    for a process that is gone.
    """
    end_children()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
