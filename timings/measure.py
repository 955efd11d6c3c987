"""Cohorts: all candidates are started once, take turns for a while, and are killed."""

import contextlib
import json
import math
import os
import random
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from common.gate import VARIABLE
from timings.processes import end, send
from timings.statistics import orders

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 300  # in which a candidate starts and makes its first interval
TURN_SECONDS = 120  # in which a turn is over, unless intervals are longer than usual
WARM_UP = 2  # turns of each candidate that are thrown away
LEAST_SECONDS = 45  # of a cohort's turns
KEPT = 2  # intervals of a turn, after the first, which is thrown away


class Candidate(NamedTuple):
    """One setting of one strategy, as it is started."""

    name: str
    command: list[str]
    variables: dict[str, str]
    cores: int = 0  # on which each process stays, if it computes on a CPU


class Job:
    """The processes of a candidate. They are stopped except when it is their turn."""

    def __init__(self, candidate: Candidate, folder: Path):
        """Start them; they find their gate in the environment."""
        self.name, self.cores = candidate.name, candidate.cores
        self.gate = folder / re.sub(r"\W", "-", self.name)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.gate))
        self.listener.listen(1024)
        self.log = self.gate.with_suffix(".log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*candidate.command, "--output", str(self.gate.with_suffix(".run"))],
                env={**os.environ, **candidate.variables, VARIABLE: str(self.gate)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.readers: dict = {}  # by the connections of processes
        self.arrived: dict[int, list] = {}  # the intervals of a turn by rank
        self.world_size, self.interval = math.inf, 0  # processes; steps
        self.problem: str | None = None

    def listen(self, handle: socket.socket) -> None:
        """Take a connection, or what a process reports at the end of its turn."""
        if handle is self.listener:
            connection, _ = handle.accept()
            self.readers[connection] = connection.makefile()
        elif line := self.readers[handle].readline():
            report = json.loads(line)
            self.world_size = report["world_size"]
            self.arrived[report["rank"]] = report["intervals"]
            self.interval = self.interval or report["intervals"][0][0]
            if self.cores:
                pin(handle, report["rank"], self.cores)
        else:
            del self.readers[handle]  # the process died, and soon its launcher ends

    def turn(self, seconds: float) -> list[tuple[float, float]]:
        """Seconds per image and share that waited for data, of the intervals kept."""
        self.arrived.clear()
        send(self.gate, signal.SIGCONT)
        for connection in self.readers:
            with contextlib.suppress(OSError):
                connection.sendall(f"{1 + KEPT}\n".encode())
        wait([self], seconds)
        found = []
        for ranks in [*zip(*self.arrived.values(), strict=False)][1:]:
            step, _, images, _ = ranks[0]
            seconds = max(rank[1] for rank in ranks)
            waited = sum(rank[3] for rank in ranks) / len(ranks)
            if step > self.interval:  # else loaders have just begun an epoch
                found.append((seconds / images, waited / seconds))
        return [] if self.problem else found

    def fail(self, problem: str = "") -> None:
        """Note why there are no more turns, and kill what is left."""
        self.close()
        lines = self.log.read_text(errors="replace").strip().splitlines()
        errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
        self.problem = problem + (errors or lines[-1:] or ["it printed nothing"])[0]

    def close(self) -> None:
        """Kill all processes."""
        end(self.gate)
        self.process.wait()
        for handle in (self.listener, *self.readers):
            handle.close()


def pin(connection: socket.socket, rank: int, number: int) -> None:
    """Keep a process, but not its loaders, on `number` cores of its rank."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    every, first = sorted(os.sched_getaffinity(0)), rank * number
    own = [every[core % len(every)] for core in range(first, first + number)]
    for thread in Path(f"/proc/{struct.unpack('3i', peer)[0]}/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread.name), own)


def wait(jobs: Sequence[Job], seconds: float) -> None:
    """Wait until all processes of each job are at the gate, and stop them there."""
    deadline, left = time.monotonic() + seconds, list(jobs)
    while left:
        owners = {handle: job for job in left for handle in job.readers}
        owners |= {job.listener: job for job in left}
        for handle in select.select(list(owners), [], [], 0.2)[0]:
            owners[handle].listen(handle)
        for job in list(left):
            if len(job.arrived) == job.world_size:
                send(job.gate, signal.SIGSTOP)
            elif job.process.poll() is not None:
                job.fail()
            elif time.monotonic() > deadline:
                job.fail(f"no answer within {seconds:.0f} s: ")
            else:
                continue
            left.remove(job)


@contextlib.contextmanager
def gates() -> Iterator[Path]:
    """A folder for gates. Whatever ends this process, all at them die with it."""
    folder = tempfile.mkdtemp(prefix="timings-")
    words = [sys.executable, "-m", "timings.processes", folder]
    guard = subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield Path(folder)
    finally:
        guard.stdin.close()
        guard.wait()


def cohort(
    candidates: Sequence[Candidate],
    seconds: float | None = None,
    after_turn: Callable[[], list] = list,
) -> dict:
    """Start candidates, let them take turns, and kill them.

    Args:
        seconds: how long turns continue; by default as long as the start took, but at
            least LEAST_SECONDS.
        after_turn: what it returns is kept with the turn.

    Returns:
        "turns", each with a name, the seconds per image of its intervals, the share
        that waited for data, and what after_turn() gave; "problems" by name;
        "start_seconds" and "seconds".
    """
    began, turns = time.monotonic(), []
    with gates() as folder:
        jobs = {one.name: Job(one, folder) for one in candidates}
        wait(list(jobs.values()), START_SECONDS)
        started = time.monotonic()
        first = [rank[0][1] for job in jobs.values() for rank in job.arrived.values()]
        limit = max([TURN_SECONDS, *(10 * KEPT * seconds for seconds in first)])
        until = started + (seconds or max(started - began, LEAST_SECONDS))
        for number, order in enumerate(orders(list(jobs), random.Random())):
            alive = [jobs[name] for name in order if not jobs[name].problem]
            over = number > WARM_UP and time.monotonic() > until
            if not alive or over:
                break
            for job in alive:
                if (kept := job.turn(limit)) and number >= WARM_UP:
                    times, waits = zip(*kept, strict=True)
                    waited = sum(waits) / len(waits)
                    turns.append([job.name, list(times), waited, after_turn()])
    problems = {name: job.problem for name, job in jobs.items() if job.problem}
    return {
        "turns": [turn for turn in turns if turn[0] not in problems],
        "problems": problems,
        "start_seconds": started - began,
        "seconds": time.monotonic() - began,
    }
