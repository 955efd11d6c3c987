"""Loader processes that are no copies of a process that communicates."""

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
from pathlib import Path

from common.errors import SIGNALS


def use_fork_server() -> None:
    """Have loader processes forked by a server, which has imported what they need.

    Source:
    https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods
    """
    root = str(Path(__file__).resolve().parent.parent)
    own = {name: os.environ.get(name) for name in ("PYTHONPATH", "PYTHONWARNINGS")}
    # The server looks for modules there, wherever this process was started; Python's
    # tracker of shared memory need not report what a killed process left
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, own["PYTHONPATH"]]))
    os.environ["PYTHONWARNINGS"] = (
        "ignore::UserWarning:multiprocessing.resource_tracker"
    )
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(["common.data"])
    # Both inherit deafness: a signal to a whole process group, as mpirun and Slurm send
    # it, is meant for the training process, which then saves
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
