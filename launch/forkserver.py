"""Loader processes that are no copies of this process: a fork server makes them.

Imported by the server itself, this module has it share what it imported, and makes it deaf: a signal to a whole process group, as mpirun and Slurm send it, is meant
for the training process, which then saves.
"""

import atexit
import gc
import multiprocessing
import multiprocessing.resource_tracker
import os
import signal
from pathlib import Path



def use_fork_server() -> None:
    """Have loader processes forked by a server that is no copy of this process.

    Source:
    https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods
    """
    root = str(Path(__file__).resolve().parent.parent)
    # The server looks for modules there, wherever this process was started
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(["common.forkserver"])
    # The tracker removes what a process that ends at once leaves behind, and need not
    # say so. And SIGUSR1, which mpirun hands to a whole process group, is not for it.
    quiet = "ignore::UserWarning:multiprocessing.resource_tracker"
    warnings, os.environ["PYTHONWARNINGS"] = os.environ.get("PYTHONWARNINGS"), quiet
    handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    multiprocessing.resource_tracker.ensure_running()
    signal.signal(signal.SIGUSR1, handler)
    del os.environ["PYTHONWARNINGS"]
    if warnings is not None:
        os.environ["PYTHONWARNINGS"] = warnings
