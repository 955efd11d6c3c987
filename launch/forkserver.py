"""Loader processes that are not forked from a process that communicates."""

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
from pathlib import Path

from common.errors import SIGNALS


def use_fork_server() -> None:
    """Fork loader processes from a server that has already imported their modules.

    Source:
    https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods
    """
    # The server must find our modules from any working directory. The ignored warnings
    # are the resource tracker's, about shared memory that a killed process left behind
    root = str(Path(__file__).resolve().parent.parent)
    ignored = "ignore::UserWarning:multiprocessing.resource_tracker"
    path, warnings = map(os.environ.get, ("PYTHONPATH", "PYTHONWARNINGS"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, path]))
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [warnings, ignored]))
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(["common.data"])
    # Both servers inherit the ignored signals. mpirun and Slurm signal the whole
    # process group, but only the training process should react, by saving
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    multiprocessing.resource_tracker.ensure_running()
    multiprocessing.forkserver.ensure_running()
    for number, handler in handlers.items():
        signal.signal(number, handler)
