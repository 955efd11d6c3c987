"""Lets benchmarks/timings alternate between runs, a few intervals at a time."""

import json
import os
import socket

VARIABLE = "TIMINGS_GATE"  # the path of the measuring process's Unix socket


class Gate:
    """A training process's connection to the measuring process.

    All processes of a run wait here between intervals: right after an all-reduce, while
    the device is idle. The reply is the number of intervals in the next turn.
    """

    def __init__(self, path: str, rank: int, world_size: int):
        """Connect; the first turn is a single warm-up interval."""
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(path)
        self.answers = self.connection.makefile()
        self.place = {"rank": rank, "world_size": world_size}
        self.intervals: list[tuple] = []
        self.turn = 1

    def wait(self, *interval: float) -> None:
        """Record an interval; at a turn's end, report and wait for the next turn.

        `interval` is (step, seconds, images, seconds of waiting for data).
        """
        self.intervals.append(interval)
        if len(self.intervals) < self.turn:
            return
        message = json.dumps({**self.place, "intervals": self.intervals})
        try:
            self.connection.sendall(f"{message}\n".encode())
            self.turn = int(self.answers.readline())
        except (OSError, ValueError):  # the measuring process is gone
            os._exit(1)
        self.intervals.clear()
