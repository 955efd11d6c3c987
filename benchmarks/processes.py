"""Find all processes of a run by an environment variable that they inherit.

`python -m benchmarks.processes FOLDER` waits until its standard input is closed, which
means that the measuring process has ended. It then kills all processes whose variable
contains a path in FOLDER, even suspended processes (SIGSTOP), and removes FOLDER.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from benchmarks.timings.gate import VARIABLE


def send(where: Path, number: int) -> bool:
    """Signal processes with VARIABLE at or below `where`; return whether any exist."""
    mark, found = f"{VARIABLE}={where}/".encode(), False
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended process, or another user's
            variables = (folder / "environ").read_bytes().split(b"\0")
            if any((one + b"/").startswith(mark) for one in variables):
                os.kill(int(folder.name), number)
                found = True
    return found


def end(where: Path) -> None:
    """Kill all processes that send() finds, and any that they start meanwhile."""
    while send(where, signal.SIGKILL):
        time.sleep(0.02)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end(Path(sys.argv[1]))
    shutil.rmtree(sys.argv[1], ignore_errors=True)
