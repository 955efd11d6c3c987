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
    root = str(Path(__file__).resolve().parent.parent)
    own = {name: os.environ.get(name) for name in ("PYTHONPATH", "PYTHONWARNINGS")}
    # The server must find our modules from every working folder. The ignored warnings
    # come from Python's resource tracker, about memory that a killed process has left
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, own["PYTHONPATH"]]))
    os.environ["PYTHONWARNINGS"] = (
        "ignore::UserWarning:multiprocessing.resource_tracker"
    )
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(["common.data"])
    # Both inherit the ignored signals: mpirun and Slurm signal the whole process group,
    # but only the training process should react, by saving
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    multiprocessing.resource_tracker.ensure_running()
    multiprocessing.forkserver.ensure_running()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for name, value in own.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
