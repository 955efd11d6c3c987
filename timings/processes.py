"""Every process of a training, found by a variable that all of them inherit.

    python -m timings.processes FOLDER

waits for the end of its standard input, then ends all processes whose gate is in
FOLDER, and removes it. So nothing outlives the process that measures, whatever ends
that one: SIGKILL also ends processes that SIGSTOP has stopped.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from common.gate import VARIABLE


def send(where: Path, number: int) -> bool:
    """Send a signal to the processes whose gate is `where` or below; were there any?"""
    mark, found = f"{VARIABLE}={where}/".encode(), False
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            variables = (folder / "environ").read_bytes().split(b"\0")
            if any((one + b"/").startswith(mark) for one in variables):
                os.kill(int(folder.name), number)
                found = True
    return found


def end(where: Path) -> None:
    """Kill the processes at a gate, and those that they start meanwhile."""
    while send(where, signal.SIGKILL):
        time.sleep(0.02)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end(Path(sys.argv[1]))
    shutil.rmtree(sys.argv[1], ignore_errors=True)
