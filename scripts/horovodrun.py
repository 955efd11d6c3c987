"""Run horovodrun without `[0]<stdout>:` before each line, and without its traceback.

    python scripts/horovodrun.py --gloo -np 2 python horovod_distributed.py ...

The processes write directly to the terminal, so they can draw progress bars. The exit
status is that of the first process that fails.
"""

import os
import signal
import sys

from horovod.runner import launch
from horovod.runner.common.util import safe_shell_exec

execute = safe_shell_exec.execute
failed: list[tuple[int, int]] = []  # rank and exit status


def execute_rank(command: str, index: int | None = None, **options) -> int:
    """Run a shell command without the prefix that Horovod prints for rank `index`."""
    if index is None:  # not a training process
        return execute(command, **options)
    for stream in (1, 2):
        if os.isatty(stream) and os.access(os.ttyname(stream), os.W_OK):
            command += f" {stream}>{os.ttyname(stream)}"
    status = execute(f"exec {command}", **options)
    if status:
        failed.append((index, status))
        for event in options["events"]:  # Horovod then ends the other processes
            event.set()
    return 0  # Horovod prints a traceback for any other value


if __name__ == "__main__":
    safe_shell_exec.execute = execute_rank
    launch.run_commandline()
    rank, status = failed[0] if failed else (0, 0)
    if status not in (0, 2):  # 2: the process has printed its error
        name = f" ({signal.Signals(status - 128).name})" if 128 < status < 160 else ""
        text = f"horovodrun: error: rank {rank} ended with status {status}{name}"
        print(text, file=sys.stderr)
    sys.exit(status)
