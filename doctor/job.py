"""Starts a command under watch, and reads what its processes wrote."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
HANG = 25  # seconds that all processes wait for each other until a job is ended


@dataclass
class Process:
    """One training process: rank, records, and those of its loader processes."""

    rank: int
    world_size: int
    records: list[dict]
    fetches: list[dict] = field(default_factory=list)

    def of(self, kind: str) -> list[dict]:
        """The records of one kind, in the order in which they were written."""
        return [one for one in self.records if one["kind"] == kind]

    def last(self) -> dict:
        """The last record that says what the process does, or how it ended."""
        return next(x for x in reversed(self.records) if x["kind"] not in LATE)


LATE = ("syncs", "fetch")


@dataclass
class Job:
    """A job that has ended."""

    processes: list[Process]  # by rank
    status: int | None = None  # of the command
    hung: bool = False  # and was ended
    interrupted: bool = False  # with Ctrl-C

    @property
    def world_size(self) -> int:
        """How many processes the job has."""
        return max((one.world_size for one in self.processes), default=0)

    def of(self, kind: str) -> list[dict]:
        """The records of one kind of all processes, with their ranks, by time."""
        found = [{**x, "rank": p.rank} for p in self.processes for x in p.of(kind)]
        return sorted(found, key=lambda one: one["time"])

    def steps(self, name: str) -> list[list[dict]]:
        """Steps that all ranks took, with an entry; each as its records, by rank.

        Weights and gradients are only of steps in which all ranks have the same ones.
        """
        rows = zip(*(process.of("step") for process in self.processes), strict=False)
        found = [list(row) for row in rows if all(one.get(name) for one in row)]
        if name in ("before", "gradients", "local"):
            found = [x for x in found if len({one["which"] for one in x}) == 1]
        return found

    def training(self, process: Process) -> int | None:
        """The number of the loader whose batches most steps are made of."""
        used = [one["loader"] for one in process.of("step")]
        used = [one for one in used if one is not None]
        return max(used, key=used.count) if used else None

    def loaders(self, number: int | None = None) -> list[dict]:
        """By rank, the first record of a loader; by default, of the training one."""
        found = []
        for process in self.processes:
            chosen = self.training(process) if number is None else number
            records = [x for x in process.of("loader") if x["loader"] == chosen]
            found += [{**records[0], "rank": process.rank}] if records else []
        return found

    def batches(self, process: Process, loader: int | None, epoch: int) -> list[dict]:
        """The batches of one epoch of a loader."""
        records = process.of("batch")
        return [x for x in records if (x["loader"], x["epoch"]) == (loader, epoch)]


def read(folder: Path) -> Job:
    """Read the records of all processes that trained or joined a process group."""
    files = {}
    for path in folder.glob("*.records"):
        records = []
        with path.open("rb") as file, contextlib.suppress(EOFError, pickle.PickleError):
            while True:
                records.append(pickle.load(file))
        files[path.name.removesuffix(".records")] = records
    found = {}
    for pid, records in files.items():
        kinds = {one["kind"] for one in records}
        ranks = [one for one in records if one["kind"] == "rank"]
        given = records[0].get("environment", {}) if records else {}
        if ranks:
            rank, size = ranks[-1]["rank"], ranks[-1]["world_size"]
        elif kinds & {"step", "init"} or ("error" in kinds and given.get("RANK")):
            rank, size = int(given["RANK"] or 0), int(given["WORLD_SIZE"] or 1)
        else:
            continue
        found[pid] = Process(rank, size, records)
    for records in files.values():
        start = records[0] if records else {}
        if start.get("parent") in found and not any(
            x["kind"] == "step" for x in records
        ):
            found[start["parent"]].fetches += [
                x for x in records if x["kind"] == "fetch"
            ]
    for process in found.values():
        process.fetches += process.of("fetch")
    latest = {}  # of processes with the same rank, the one that trained
    for process in sorted(found.values(), key=lambda one: len(one.records)):
        latest[process.rank] = process
    return Job([latest[rank] for rank in sorted(latest)])


def waits(folder: Path) -> bool:
    """Whether all processes have waited for each other for long."""
    signs = folder / "waits"
    if not signs.exists() or time.time() - signs.stat().st_mtime > 6:
        return False
    job, found = read(folder), 0
    for process in job.processes:
        last = process.last()
        if last["kind"] in ("exit", "error"):
            continue
        if last["kind"] != "waits" or not last["what"] or last["seconds"] < HANG:
            return False
        found += 1
    return found > 0 and len(job.processes) == job.world_size


def end(process: subprocess.Popen) -> None:
    """End a command and all that it started."""
    for number, seconds in (
        (signal.SIGINT, 10),
        (signal.SIGTERM, 10),
        (signal.SIGKILL, 9),
    ):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run(command: list[str], folder: Path, **options: str) -> Job:
    """Run a command under watch until its end, Ctrl-C or a hang.

    Args:
        folder: where processes write their records.
        options: variables for watch.py.
    """
    paths = [str(HERE / "hook"), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **options}
    variables["DOCTOR_FOLDER"] = str(folder)
    hung = interrupted = False
    process = subprocess.Popen(
        command, env={**os.environ, **variables}, start_new_session=True
    )
    try:
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
            if process.poll() is None and waits(folder):
                hung = True
                print("doctor: the processes wait for each other", file=sys.stderr)
                end(process)
    except KeyboardInterrupt:
        interrupted = True
        print("doctor: interrupted; ending the job", file=sys.stderr)
    finally:
        end(process)
    time.sleep(0.2)
    job = read(folder)
    job.status, job.hung, job.interrupted = process.returncode, hung, interrupted
    return job
