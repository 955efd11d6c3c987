"""Runs a cohort: starts its candidates, lets them take turns, and kills them."""

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.comparison import ROOT
from benchmarks.processes import end, send
from benchmarks.timings.gate import VARIABLE
from benchmarks.timings.statistics import orders

START_SECONDS = 300  # limit for a start (including one interval), and for a turn
WARM_UP = 1  # number of each candidate's first turns that are discarded
LEAST_SECONDS = 40  # minimum total for a cohort's turns
KEPT = 2  # intervals kept per turn, without the first, which is discarded


class Candidate(NamedTuple):
    """A strategy with its settings, and the command that starts it."""

    name: str
    command: list[str]
    variables: dict[str, str]
    cores: int = 0  # number of cores to which each process is pinned; 0: not pinned


class Job:
    """A candidate's processes, which are suspended except during their turns."""

    def __init__(self, candidate: Candidate, folder: Path):
        """Start the processes; an environment variable gives them the gate's path."""
        self.name, self.cores = candidate.name, candidate.cores
        self.gate = folder / re.sub(r"\W", "-", self.name)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.gate))
        self.listener.listen(1024)
        self.log = self.gate.with_suffix(".log")
        hook = ROOT / "benchmarks" / "timings" / "hook"
        paths = [str(hook), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {VARIABLE: str(self.gate), "PYTHONPATH": os.pathsep.join(paths)}
        own |= {"TMPDIR": str(folder)}  # gates() removes this folder
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*candidate.command, "--output", str(self.gate.with_suffix(".run"))],
                env={**os.environ, **candidate.variables, **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.readers: dict = {}  # connection -> its file
        self.arrived: dict[int, list] = {}  # rank -> intervals of this turn
        self.world_size = math.inf  # until a process reports it
        self.problem: str | None = None

    def listen(self, handle: socket.socket) -> None:
        """Accept a connection, or read a process's report at the end of its turn."""
        if handle is self.listener:
            connection, _ = handle.accept()
            self.readers[connection] = connection.makefile()
        elif line := self.readers[handle].readline():
            report = json.loads(line)
            self.world_size = report["world_size"]
            self.arrived[report["rank"]] = report["intervals"]
            if self.cores:
                pin(handle, report["rank"], self.cores)
        else:
            del self.readers[handle]  # the process died; its launcher will exit soon

    def turn(self) -> list[tuple[float, float]]:
        """Run a turn; return usable intervals as (seconds per image, waiting share)."""
        self.arrived.clear()
        send(self.gate, signal.SIGCONT)
        for connection in self.readers:
            with contextlib.suppress(OSError):
                connection.sendall(f"{1 + KEPT}\n".encode())
        wait([self])
        found = []
        for ranks in [*zip(*self.arrived.values(), strict=False)][1:]:
            number, _, images, _ = ranks[0]
            seconds = max(rank[1] for rank in ranks)
            waited = sum(rank[3] for rank in ranks) / len(ranks)
            if number > 1:  # an epoch's first interval includes the epoch's start
                found.append((seconds / images, waited / seconds))
        return [] if self.problem else found

    def fail(self, problem: str = "") -> None:
        """Record why the candidate gets no more turns, and kill its processes."""
        self.close()
        lines = self.log.read_text(errors="replace").strip().splitlines()
        errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
        self.problem = problem + (errors or lines[-1:] or ["it printed nothing"])[0]

    def close(self) -> None:
        """Kill all of the candidate's processes."""
        end(self.gate)
        self.process.wait()
        for handle in (self.listener, *self.readers):
            handle.close()


def pin(connection: socket.socket, rank: int, number: int) -> None:
    """Pin a rank's process and its loader processes to `number` cores for this rank."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    every, first = sorted(os.sched_getaffinity(0)), rank * number
    own = [every[core % len(every)] for core in range(first, first + number)]
    processes = [struct.unpack("3i", peer)[0]]
    for process in processes:  # the loop appends the children
        with contextlib.suppress(OSError):  # the process has ended
            for thread in Path(f"/proc/{process}/task").glob("*"):
                os.sched_setaffinity(int(thread.name), own)
                processes += (thread / "children").read_text().split()


def wait(jobs: Sequence[Job]) -> None:
    """Wait until all processes of each job are at the gate, then suspend them there.

    A job that does not arrive within START_SECONDS fails.
    """
    deadline, left = time.monotonic() + START_SECONDS, list(jobs)
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
                job.fail(f"no answer within {START_SECONDS} s: ")
            else:
                continue
            left.remove(job)


@contextlib.contextmanager
def gates() -> Iterator[Path]:
    """Yield a folder for gates; afterwards, kill all processes that use these gates."""
    folder = tempfile.mkdtemp(prefix="timings-")
    words = [sys.executable, "-m", "benchmarks.processes", folder]
    guard = subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield Path(folder)
    finally:
        guard.stdin.close()
        guard.wait()


def cohort(candidates: Sequence[Candidate], seconds: float | None = None) -> dict:
    """Start candidates, let them take turns for `seconds`, and kill them.

    By default, the turns take as long as the start took, but at least LEAST_SECONDS.
    Returns "turns", a list of [candidate's name, seconds per image in each interval,
    share of time spent waiting for data]; "problems", the candidates' error messages
    by name; "start_seconds"; and the total "seconds".
    """
    began, turns = time.monotonic(), []
    with gates() as folder:
        jobs = {one.name: Job(one, folder) for one in candidates}
        wait(list(jobs.values()))
        started = time.monotonic()
        until = started + (seconds or max(started - began, LEAST_SECONDS))
        for number, order in enumerate(orders(list(jobs), random.Random())):
            alive = [jobs[name] for name in order if not jobs[name].problem]
            if not alive or (number > WARM_UP and time.monotonic() > until):
                break
            found = [(job, job.turn()) for job in alive]
            # Keep a round only if all jobs have results, so that nth turns coincide
            if number >= WARM_UP and all(kept or job.problem for job, kept in found):
                for job, kept in found:
                    waited = sum(wait for _, wait in kept) / max(1, len(kept))
                    turns.append([job.name, [time for time, _ in kept], waited])
    problems = {name: job.problem for name, job in jobs.items() if job.problem}
    return {
        "turns": [turn for turn in turns if turn[0] not in problems],
        "problems": problems,
        "start_seconds": started - began,
        "seconds": time.monotonic() - began,
    }
