"""horovodrun with readable output: it leaves out `[0]<stdout>:` and its own traceback.

    python scripts/horovodrun.py --gloo -np 2 python horovod_distributed.py ...

Its flags are those of horovodrun. On a terminal, the processes write to the terminal
directly, so that they can draw progress bars. The exit status is that of the first
process that failed.
"""

import os
import signal
import sys

from horovod.runner import launch
from horovod.runner.common.util import safe_shell_exec

execute = safe_shell_exec.execute
failed: list[tuple[int, int]] = []  # rank and exit status


def execute_rank(command: str, index: int | None = None, **options) -> int:
    """Run the shell command of rank `index`, or another one without a rank.

    Horovod's `execute` adds a prefix to the output of a command that has an index.
    """
    if index is None:
        return execute(command, **options)
    terminals = [
        f"{stream}>{os.ttyname(stream)}" for stream in (1, 2) if os.isatty(stream)
    ]
    status = execute(f"exec {command} {' '.join(terminals)}", **options)
    if status:
        failed.append((index, status))
        for event in options["events"]:  # ends the other processes
            event.set()
    return 0  # Horovod would print a traceback for any other value


def main() -> int:
    """Run horovodrun; return the exit status."""
    safe_shell_exec.execute = execute_rank
    launch.run_commandline()
    if not failed:
        return 0
    rank, status = failed[0]
    if status != 2:  # with 2, the process has printed what the user can do
        name = f" ({signal.Signals(status - 128).name})" if status > 128 else ""
        text = f"horovodrun: error: rank {rank} ended with status {status}{name}"
        print(text, file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
