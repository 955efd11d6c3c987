"""Where a training waits for its turn, when timings/ compares it with others."""

import json
import os
import socket

VARIABLE = "TIMINGS_GATE"  # names the Unix socket of the process that measures


class Gate:
    """One process's connection to the process that measures.

    All processes of a training wait between two intervals, when they have just met in
    an all-reduce and the device is idle. The answer is how many intervals make a turn.
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
        """Note an interval. After the last one of a turn, report and wait for the next.

        Without the process that measures this one ends.
        """
        self.intervals.append(interval)
        if len(self.intervals) < self.turn:
            return
        message = json.dumps({**self.place, "intervals": self.intervals})
        try:
            self.connection.sendall(f"{message}\n".encode())
            self.turn = int(self.answers.readline())
        except (OSError, ValueError):
            os._exit(1)
        self.intervals.clear()
