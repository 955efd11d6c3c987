"""Start processes and run programs in them; a fork server that has imported PyTorch forks them."""

import gc
import os
import runpy
import socket
import sys
import time
from functools import partial
from multiprocessing import forkserver, get_context, set_start_method
from pathlib import Path
from unittest import mock

import torch
from torch.multiprocessing import start_processes

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("dataparallel", "distributed", "multiprocessing_distributed")


def free_port() -> int:
    """Return a port of this machine on which no process listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def fork_server():
    """Start a process that imports everything, and forks others; it must not start threads."""
    own = f"{ROOT}:{ROOT / 'tests'}:"  # the server's imports
    others = os.environ.get("PYTHONPATH", "").removeprefix(own)
    os.environ["PYTHONPATH"] = own + others
    os.environ["OMP_NUM_THREADS"] = "1"
    context = get_context("forkserver")
    context.set_forkserver_preload(["ranks", *SCRIPTS])
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        forkserver.ensure_running()
    return context


class Played:
    """Processes that are killed when the block ends; process N's output goes to N.log."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.processes = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()  # also ends stopped processes
            process.join()

    def start(self, task, *arguments) -> None:
        """Run a function from a file in tests/ in a new process."""
        log = self.folder / f"{len(self.processes)}.log"
        process = fork_server().Process(target=_run, args=(log, task, arguments))
        process.start()
        self.processes.append(process)

    def end(self, seconds: float = 60) -> list[int]:
        """Wait for all processes; return their exit statuses (negative if killed)."""
        until = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0, until - time.monotonic()))
        statuses = [process.exitcode for process in self.processes]
        assert None not in statuses, f"{statuses} after {seconds} s:\n{self.text()}"
        return statuses

    def log(self, number: int) -> str:
        return (self.folder / f"{number}.log").read_text()

    def text(self) -> str:
        return "\n".join(file.read_text() for file in sorted(self.folder.glob("*.log")))


def _run(log: Path, task, arguments: tuple) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    gc.freeze()  # garbage collections then ignore the modules, which saves time
    torch.set_num_threads(1)
    set_start_method("fork", force=True)  # as in a launched script
    task(*arguments)


def python(words: tuple, variables: dict) -> None:
    """Run `python WORDS` in this process, where PyTorch is already imported."""
    os.environ.clear()
    os.environ.update(variables)
    sys.argv[:] = [str(word) for word in words]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.modules.pop(sys.argv[0], None)  # otherwise runpy prints a warning
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        run_path(sys.argv[0])


def run_path(path) -> None:
    sys.path[:0] = [str(Path(path).parent)]  # the file may import from its folder
    runpy.run_path(str(path), run_name="__main__")


def lesson(path: Path, variables: dict, errors: Path) -> None:
    """Run a program from tutorial/, and fork the processes that the program starts.

    Args:
        errors: receives what the program prints to standard error, such as times.
    """
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    torch.multiprocessing.spawn = spawn
    python((path,), {**os.environ, **variables})


def spawn(function, args: tuple, nprocs: int) -> None:
    """Replace torch.multiprocessing.spawn by a function that forks.

    No process begins before all have been forked: while a process connects to this process's
    TCPStore, the store's thread briefly holds a glibc lock, and a process forked then would hang.
    """
    begin = get_context("fork").Event()
    after = partial(_after, begin, function)
    forks = start_processes(after, args, nprocs, join=False, start_method="fork")
    begin.set()
    while not forks.join():
        pass


def _after(begin, function, rank: int, *args) -> None:
    begin.wait()
    torch.set_num_threads(1)  # replaces the parent's pool before threads need it
    function(rank, *args)
