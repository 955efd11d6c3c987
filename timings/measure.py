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
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from common.gate import VARIABLE
from timings.processes import end, send
from timings.statistics import orders

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 300  # in which a candidate has to start, and make its first interval
TURN_SECONDS = 120  # the longest turn, where intervals are not longer than usual
KEPT = 2  # intervals of a turn, after the first, which is thrown away
# Settings of the launch scripts with which a run would be another one
LAUNCH_SETTINGS = (
    *("LAUNCHER", "CONTROLLER", "HOSTS", "NNODES", "NODE_RANK", "NPROC", "SCRIPT"),
    *("RDZV_ENDPOINT", "RDZV_ID", "MAX_RESTARTS", "PREFLIGHT", "INTERFACE"),
)


class Candidate(NamedTuple):
    """One setting of one strategy."""

    name: str
    command: list[str]
    variables: dict[str, str]
    first_steps: int  # of an epoch, which do not count: loaders start anew


class Job:
    """The processes of a candidate. They are stopped except when it is their turn."""

    def __init__(self, candidate: Candidate, folder: Path):
        """Start them; they find the gate by their environment."""
        self.candidate, self.name = candidate, candidate.name
        self.gate = folder / re.sub(r"\W", "-", self.name)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.gate))
        self.listener.listen(1024)
        self.log = self.gate.with_suffix(".log")
        output = ["--output", str(self.gate.with_suffix(".run"))]
        variables = {n: v for n, v in os.environ.items() if n not in LAUNCH_SETTINGS}
        variables |= {**candidate.variables, VARIABLE: str(self.gate)}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*candidate.command, *output],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.connections: dict = {}  # readers by the sockets of processes
        self.arrived: dict[int, list] = {}  # intervals of a turn by rank
        self.world_size = math.inf
        self.slowest = 0.0  # seconds of an interval
        self.problem: str | None = None

    def listen(self, handle: socket.socket) -> None:
        """Take a connection, or what a process reports at the end of its turn."""
        if handle is self.listener:
            connection, _ = handle.accept()
            self.connections[connection] = connection.makefile()
        elif line := self.connections[handle].readline():
            report = json.loads(line)
            self.world_size = report["world_size"]
            self.arrived[report["rank"]] = report["intervals"]
        else:
            self.connections.pop(handle)  # it died, and soon its launcher ends

    def go(self, intervals: int) -> None:
        """Begin a turn."""
        self.arrived.clear()
        send(self.gate, signal.SIGCONT)
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.sendall(f"{intervals}\n".encode())

    def fail(self, problem: str | None = None) -> None:
        """Note why there are no more turns, and kill what is left."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
        last = (errors or lines or ["it printed nothing"])[0 if errors else -1]
        self.problem = f"{problem}: {last}" if problem else last
        self.close()

    def close(self) -> None:
        """Kill all processes."""
        end(self.gate)
        self.process.wait()
        for handle in (self.listener, *self.connections):
            handle.close()

    def turn(self) -> list[tuple[float, float]]:
        """Seconds per image, and share of them that waited for data, per interval."""
        found = []
        for ranks in zip(*self.arrived.values(), strict=True):
            step, _, images, _ = ranks[0]
            seconds = max(rank[1] for rank in ranks)
            waited = sum(rank[3] for rank in ranks) / len(ranks)
            self.slowest = max(self.slowest, seconds)
            if step > self.candidate.first_steps:
                found.append((seconds / images, waited / seconds))
        return found


def wait(jobs: Sequence[Job], seconds: float) -> None:
    """Wait until all processes of each job are at the gate, and stop them there."""
    deadline, left = time.monotonic() + seconds, list(jobs)
    while left:
        owners = {handle: job for job in left for handle in job.connections}
        owners |= {job.listener: job for job in left}
        for handle in select.select(list(owners), [], [], 0.2)[0]:
            owners[handle].listen(handle)
        for job in list(left):
            if len(job.arrived) == job.world_size:
                send(job.gate, signal.SIGSTOP)
            elif job.process.poll() is not None:
                job.fail()
            elif time.monotonic() > deadline:
                job.fail(f"no answer within {seconds:.0f} s")
            else:
                continue
            left.remove(job)


@contextlib.contextmanager
def gates() -> Iterator[Path]:
    """A folder for gates. Whatever ends this process, all at them die with it."""
    folder = Path(tempfile.mkdtemp(prefix="timings-"))
    guard = subprocess.Popen(
        [sys.executable, "-m", "timings.processes", str(folder)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield folder
    finally:
        guard.stdin.close()
        guard.wait()


def cohort(
    candidates: Sequence[Candidate],
    draw: random.Random,
    seconds: float | None = None,
    blocks: int | None = None,
    between=lambda: None,
) -> dict:
    """Start candidates, let them take turns, and kill them.

    Args:
        draw: of the order.
        seconds: of all turns; by default as long as the start took.
        blocks: in place of `seconds`, how many turns each has.
        between: called after each turn; what it returns is kept with the turn.

    Returns:
        "turns", each with a name and the seconds per image of its intervals; "waits",
        the share that waited for data; "problems" by name; "seconds" and
        "start_seconds".
    """
    began = time.monotonic()
    found: dict = {"turns": [], "waits": {}, "problems": {}, "between": []}
    with gates() as folder:
        jobs = {c.name: Job(c, folder) for c in candidates}
        wait(list(jobs.values()), START_SECONDS)
        started = time.monotonic()
        found["start_seconds"] = started - began
        seconds = seconds or max(20.0, started - began)
        waits: dict[str, list[float]] = {name: [] for name in jobs}
        for job in jobs.values():
            job.turn()  # the first, for the length of its interval
        for number, order in enumerate(orders(list(jobs), draw)):
            alive = [jobs[name] for name in order if not jobs[name].problem]
            over = time.monotonic() - started > seconds and number > 1
            if not alive or (number == blocks if blocks else over):
                break
            for job in alive:
                limit = max(TURN_SECONDS, 10 * job.slowest * (1 + KEPT))
                job.go(1 + KEPT)
                wait([job], limit)
                if not job.problem and (kept := job.turn()[1:]):
                    found["turns"].append([job.name, [one for one, _ in kept]])
                    waits[job.name] += [share for _, share in kept]
                    found["between"].append(between())
        for job in jobs.values():
            if job.problem:
                found["problems"][job.name] = job.problem
            elif waits[job.name]:
                found["waits"][job.name] = sum(waits[job.name]) / len(waits[job.name])
        dead = found["problems"]
        found["turns"] = [turn for turn in found["turns"] if turn[0] not in dead]
    return {**found, "seconds": time.monotonic() - began}
