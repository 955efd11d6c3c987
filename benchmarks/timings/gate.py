"""Runs in the training processes, and makes them wait between their turns.

hook/sitecustomize.py attaches the gate without a change to the scripts, which call
Progress.show_interval() right after an all-reduce, while the device is idle.
"""

import functools
import importlib.util
import json
import os
import socket
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec

VARIABLE = "TIMINGS_GATE"  # its value: the measuring process's Unix socket


def place() -> tuple[int, int]:
    """Return this process's rank and the number of processes."""
    from torch import distributed

    if distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    if horovod := sys.modules.get("horovod.torch"):
        return horovod.rank(), horovod.size()
    return 0, 1


class Gate:
    """A training process's connection to the measuring process.

    The measuring process answers a report with the next turn's number of intervals.
    """

    def __init__(self, path: str, rank: int, world_size: int):
        """Connect to the socket; the first turn is a single warm-up interval."""
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(path)
        self.answers = self.connection.makefile()
        self.place = {"rank": rank, "world_size": world_size}
        self.intervals: list[tuple] = []
        self.turn = 1

    def wait(self, *interval: float) -> None:
        """Record an interval; at a turn's end, report it and wait for the next turn."""
        self.intervals.append(interval)
        if len(self.intervals) < self.turn:
            return
        message = json.dumps({**self.place, "intervals": self.intervals})
        try:
            self.connection.sendall(f"{message}\n".encode())
            self.turn = int(self.answers.readline())
        except (OSError, ValueError):  # the measuring process has ended
            os._exit(1)
        self.intervals.clear()


@functools.cache
def gate() -> Gate:
    """Return this process's gate; the first call connects to the measuring process."""
    return Gate(os.environ[VARIABLE], *place())


def after_interval(number: int, seconds: float, images: int, waited: float) -> None:
    """Record an interval and its `number` in the epoch; wait if the turn is over."""
    gate().wait(number, seconds, images, waited)


def attach(progress: type) -> None:
    """Make common.meters.Progress wait at the gate after each interval."""
    record = progress.show_interval

    def show_interval(self, *args, **options) -> None:
        record(self, *args, **options)
        after_interval(len(self.intervals), *self.intervals[-1])
        self.began = time.perf_counter()  # waiting is not part of the next interval

    progress.show_interval = show_interval


class Attach(MetaPathFinder):
    """Calls attach() when a training process imports common.meters."""

    def find_spec(self, name: str, path, target=None) -> ModuleSpec | None:
        """Return the import spec of common.meters; its loader also calls attach()."""
        if name != "common.meters":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module) -> None:
            execute(module)
            attach(module.Progress)

        spec.loader.exec_module = exec_module
        return spec
