"""Programs, and loaders, that a fork server starts at once.

What process N prints goes to N.log of a folder.
"""

import ctypes
import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import torch
from ranks import ROOT, fork_server
from torch.multiprocessing import start_processes

from common.arguments import build_parser, parse_arguments
from common.data import build_datasets, build_loader, share_out
from common.errors import exit_status

CLONE_NEWNS = 0x20000  # https://man7.org/linux/man-pages/man2/unshare.2.html


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

    def errors(self) -> list[str]:
        """The lines that preflight.py printed as errors."""
        start = "preflight.py: error: "
        lines = self.text().splitlines()
        return [line.removeprefix(start) for line in lines if line.startswith(start)]


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
        sys.path.insert(0, os.path.dirname(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


# --- lessons ---


def lesson(path: Path, variables: dict) -> None:
    """Run a lesson of tutorial/; the processes that it starts are forks too."""
    torch.multiprocessing.spawn = partial(start_processes, start_method="fork")
    python((path,), {**os.environ, **variables})


# --- preflight ---


def preflight(variables: dict, flags: list, fault: str | None) -> None:
    """One process of launch/preflight.py as a launcher starts it, maybe with a fault."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import preflight

    def stop(task):
        os.kill(os.getpid(), signal.SIGSTOP)

    def hang(task):
        time.sleep(600)

    def fail(task):
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nand so on")

    connect = preflight.Task.connect

    def connect_wrongly(task):
        reduce = connect(task)
        return lambda tensor: reduce(tensor) + 1

    faults = {
        "stops": ("all_reduce", stop),
        "hangs": ("all_reduce", hang),
        "device hangs": ("compute", hang),
        "device fails": ("compute", fail),
        "adds up wrongly": ("connect", connect_wrongly),
    }
    if fault:
        setattr(preflight.Task, *faults[fault])
    os.environ.update(variables)
    sys.argv[:] = ["preflight.py", *flags]
    with exit_status():
        preflight.main(flags)


# --- loaders ---


def load(
    data, flags: list, memory: int | None, files: tuple | None, check: bool
) -> None:
    """Load two epochs slowly, so that loader processes get ahead as far as they may.

    Args:
        data: folder of images.
        flags: of a training script.
        memory: bytes of shared memory, in a file system of this process's own.
        files: soft and hard limit on open files.
        check: whether limits are looked at.
    """
    if memory:
        assert not ctypes.CDLL(None).unshare(CLONE_NEWNS)
        for command in (
            "mount --make-rprivate /",
            f"mount -t tmpfs -o size={memory} tmpfs /dev/shm",
        ):
            subprocess.run(command.split(), check=True)
    if files:
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
    flags = ["--data", str(data), "--precision", "fp32", "--device", "cpu", *flags]
    sys.argv[0] = "loader"
    warnings.simplefilter("ignore")  # of more loader processes than cores
    device = torch.device("cpu")
    with exit_status():
        args = parse_arguments(build_parser("Loads."), "loader", flags)
        if check:
            share_out(args, 0, 1, 1)
        train_set, val_set = build_datasets(args)
        share_out(args, 0, 1, 1)
        loaders = [
            build_loader(args, images, range(len(images)), device, training)
            for images, training in ((train_set, True), (val_set, False))
        ]
        for _ in range(2):
            for loader in loaders:
                for _ in loader:
                    time.sleep(0.1)
        print("loaded", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        sys.stdout.flush()
        os._exit(0)
