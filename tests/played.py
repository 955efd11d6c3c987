"""Programs that a fork server starts; what process N prints goes to N.log of a folder."""

import multiprocessing
import os
import runpy
import sys
import time
from functools import partial
from pathlib import Path

import torch
from ranks import fork_server
from torch.multiprocessing import start_processes


class Played:
    """Processes with a log each; killed when the block is left."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.processes = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()  # ends stopped ones too
            process.join()

    def start(self, task, *arguments) -> None:
        """Run a function of this file in a new process."""
        log = self.folder / f"{len(self.processes)}.log"
        process = fork_server().Process(target=_run, args=(log, task, arguments))
        process.start()
        self.processes.append(process)

    def end(self, *numbers: int, seconds: float = 40) -> list[int]:
        """Wait for processes; their exit statuses."""
        chosen = [self.processes[number] for number in numbers] or self.processes
        until = time.monotonic() + seconds
        for process in chosen:
            process.join(max(0, until - time.monotonic()))
        assert all(process.exitcode is not None for process in chosen), self.text()
        return [process.exitcode for process in chosen]

    def log(self, number: int) -> str:
        return (self.folder / f"{number}.log").read_text()

    def text(self) -> str:
        return "\n".join(self.log(number) for number in range(len(self.processes)))


def _run(log: Path, task, arguments: tuple) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # as in a launched script
    task(*arguments)


# --- any program ---


def run_python(folder: Path, *words, **variables: str) -> tuple[int, str]:
    """Status of `python WORDS`, and all that it printed."""
    from conftest import environment  # which looks for what is missing here

    with Played(folder) as played:
        played.start(python, words, environment(**variables))
        return played.end()[0], played.log(0)


def python(words: tuple, variables: dict) -> None:
    """Do what `python WORDS` does, PyTorch being imported already."""
    os.environ.clear()
    os.environ.update(variables)
    sys.argv[:] = [str(word) for word in words]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.modules.pop(sys.argv[0], None)  # or runpy warns
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


# --- lessons ---


def lesson(path: Path, variables: dict) -> None:
    """Run a lesson of tutorial/; the processes that it starts are forks too."""
    torch.multiprocessing.spawn = partial(start_processes, start_method="fork")
    python((path,), {**os.environ, **variables})
