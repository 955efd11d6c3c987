"""Run a command under watch, and read what its processes recorded."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

HERE = Path(__file__).resolve().parent
HANG = 40  # seconds: a job is ended if all its processes wait this long for each other


@dataclass
class Process:
    """A training process: its rank, its records and its loader processes' records."""

    rank: int
    world_size: int
    records: list[dict]
    fetches: list[dict] = field(default_factory=list)

    def of(self, kind: str) -> list[dict]:
        """Return the records of one kind, in the order they were written."""
        return [one for one in self.records if one["kind"] == kind]

    def last(self) -> dict:
        """Return the last record of what the process was doing, or of how it ended."""
        return next(x for x in reversed(self.records) if x["kind"] != "fetch")

    @cached_property
    def training(self) -> int | None:
        """The number of the loader that feeds most steps."""
        used = [one["loader"] for one in self.of("step") if one["loader"] is not None]
        return max(used, key=used.count) if used else None

    def batches(self, epoch: int | None = None) -> list[dict]:
        """Return the training loader's batches, in one epoch or in all of them."""
        own = [one for one in self.of("batch") if one["loader"] == self.training]
        return [one for one in own if epoch in (None, one["epoch"])]

    def whole_epochs(self) -> set[int]:
        """Return the training loader's epochs that were read to the end."""
        own = [one for one in self.of("end") if one["loader"] == self.training]
        return {one["epoch"] for one in own if one["whole"]}


@dataclass
class Job:
    """A job that has ended."""

    processes: list[Process]  # by rank
    status: int | None = None  # of the command
    hung: bool = False  # and doctor ended it
    interrupted: bool = False  # with Ctrl-C

    @property
    def world_size(self) -> int:
        """How many processes the job has."""
        return max((one.world_size for one in self.processes), default=0)

    def of(self, kind: str) -> list[dict]:
        """Return the processes' records of one kind, with ranks, sorted by time."""
        found = [{**x, "rank": p.rank} for p in self.processes for x in p.of(kind)]
        return sorted(found, key=lambda one: one["time"])

    def steps(self, name: str) -> list[list[dict]]:
        """Return the steps for which all ranks have an entry: lists of records by rank.

        Weights and gradients count only if all ranks update the same weights.
        """
        rows = zip(*(process.of("step") for process in self.processes), strict=False)
        found = [list(row) for row in rows if all(one.get(name) for one in row)]
        if name in ("before", "gradients"):
            found = [x for x in found if len({one["which"] for one in x}) == 1]
        return found

    def loaders(self, number: int | None = None) -> list[dict]:
        """Return each rank's first record of a loader, by default the training one."""
        found = []
        for process in self.processes:
            chosen = process.training if number is None else number
            found += [x for x in process.of("loader") if x["loader"] == chosen][:1]
        return found


def read(folder: Path) -> Job:
    """Read the records of all processes that trained or joined a process group."""
    files, found, latest = {}, {}, {}
    for path in folder.glob("*.records"):
        files[path.stem] = records = []
        with path.open("rb") as file, contextlib.suppress(EOFError, pickle.PickleError):
            while True:
                records.append(pickle.load(file))
    for name, records in files.items():
        kinds = {one["kind"]: one for one in records}
        given = kinds["start"]["environment"] if records else {}
        if one := kinds.get("rank"):
            found[name] = Process(one["rank"], one["world_size"], records)
        elif {"step", "init"} & {*kinds} or ("error" in kinds and given["RANK"]):
            rank, size = int(given["RANK"] or 0), int(given["WORLD_SIZE"] or 1)
            found[name] = Process(rank, size, records)
    for name, records in files.items():
        parent = records[0]["parent"] if records else None
        owner = found.get(name) or found.get(parent)
        if owner:
            owner.fetches += [one for one in records if one["kind"] == "fetch"]
    # If several processes have the same rank, keep the one that trained
    for process in sorted(found.values(), key=lambda one: len(one.records)):
        latest[process.rank] = process
    return Job([latest[rank] for rank in sorted(latest)])


def waits(folder: Path) -> bool:
    """Return whether all processes have been waiting for each other for a long time."""
    signs = folder / "waits"
    if not signs.exists() or time.time() - signs.stat().st_mtime > 6:
        return False
    job = read(folder)
    last = [process.last() for process in job.processes]
    last = [one for one in last if one["kind"] not in ("exit", "error")]
    if not last or len(job.processes) < job.world_size:
        return False
    return all(x["kind"] == "waits" and x["what"] and x["seconds"] > HANG for x in last)


def end(process: subprocess.Popen, folder: Path) -> None:
    """End a command and all processes that record into the folder."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
            break
    own = f"DOCTOR_FOLDER={folder}\0".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if own in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)


def run(command: list[str], folder: Path, **options: str) -> Job:
    """Run a command under watch until its end, Ctrl-C or a hang.

    Args:
        folder: where the processes write their records.
        options: environment variables for watch.py.
    """
    paths = [str(HERE / "hook"), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **options}
    variables = {**os.environ, **variables, "DOCTOR_FOLDER": str(folder)}
    hung = interrupted = False
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C
    process = subprocess.Popen(command, env=variables, start_new_session=True)
    try:
        while process.poll() is None and not hung:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
            hung = process.poll() is None and waits(folder)
        if hung:
            print("doctor: the processes wait for each other", file=sys.stderr)
    except KeyboardInterrupt:
        interrupted = True
        print("doctor: interrupted; ending the job", file=sys.stderr)
    finally:
        if process.poll() is None:
            end(process, folder)
    time.sleep(0.2)
    job = read(folder)
    job.status, job.hung, job.interrupted = process.returncode, hung, interrupted
    return job
