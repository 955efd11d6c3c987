"""Read what the processes of a finished job have recorded."""

import re
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from . import event
from .event import Event, Exit, Failed, Joins, Rank, Start, Waits
from .loaders import Batch, Epoch, EpochEnd
from .moments import Step, Wraps

Kind = TypeVar("Kind", bound=Event)
LOST = re.compile(
    r"onnection (closed|reset|refused)|roken pipe|recvValue failed|Socket Timeout|"
    r"Process(Raised|Exited)Exception|ChildFailedError|Horovod has been shut down|"
    r"HorovodInternalError|NCCL error"
)


@dataclass
class Process:
    """A training process: its rank, its events and its loader processes' events."""

    rank: int
    world_size: int
    events: list[Event]
    loaders: list[Event] = field(default_factory=list)
    others: list[Event] = field(default_factory=list)  # see launches

    @cached_property
    def launches(self) -> list[Event]:
        """The events of all processes with this rank, such as before a resume."""
        return sorted(self.events + self.others, key=lambda one: one.time)

    def of(self, kind: type[Kind], loaders: bool = False) -> list[Kind]:
        """Return events of one kind in order; with `loaders`, add loader processes'."""
        events = self.events + self.loaders if loaders else self.events
        return [one for one in events if isinstance(one, kind)]

    @cached_property
    def training(self) -> int | None:
        """The number of the training loader, whose batches most steps use."""
        used = [one.loader for one in self.of(Step) if one.loader is not None]
        return max(used, key=used.count) if used else None

    @cached_property
    def epochs(self) -> list[int]:
        """The numbers, in order, of the training loader's passes that steps used."""
        fed = {one.epoch for one in self.of(Step) if one.loader == self.training}
        ends = [one for one in self.of(EpochEnd) if one.loader == self.training]
        return sorted(fed | {one.epoch for one in ends if one.steps})

    def batches(self, epoch: int, loader: int | None = None) -> list[Batch]:
        """Return the batches of a loader's pass (by default, the training loader's)."""
        loader = self.training if loader is None else loader
        return self._batches.get((loader, epoch), [])

    @cached_property
    def _batches(self) -> dict[tuple[int, int], list[Batch]]:
        found = {}
        for one in self.of(Batch):
            found.setdefault((one.loader, one.epoch), []).append(one)
        return found

    @property
    def trained(self) -> list[Batch]:
        """The training loader's batches."""
        return [one for one in self.of(Batch) if one.loader == self.training]

    def whole(self, epoch: int, loader: int | None = None) -> bool:
        """Return whether the process read all batches of a pass."""
        key = (self.training if loader is None else loader), epoch
        ends = [x.whole for x in self.of(EpochEnd) if (x.loader, x.epoch) == key]
        lengths = [x.length for x in self.of(Epoch) if (x.loader, x.epoch) == key]
        return any(ends) or len(self.batches(epoch, loader)) in lengths

    def loader(self, number: int | None = None) -> Epoch | None:
        """Return the first pass over a loader (by default, the training loader)."""
        number = self.training if number is None else number
        return next((one for one in self.of(Epoch) if one.loader == number), None)


@dataclass(eq=False)
class Job:
    """A finished job: its processes, and how it ended."""

    processes: list[Process]  # sorted by rank
    status: int | None = None  # the command's exit status
    hung: bool = False  # doctor ended the job, because it hung
    interrupted: bool = False  # the user pressed Ctrl-C

    @property
    def world_size(self) -> int:
        """The number of processes in the job."""
        return max((one.world_size for one in self.processes), default=0)

    @property
    def watched(self) -> int:
        """The number of watched optimizer steps that all ranks took."""
        counts = [sum(x.watched for x in one.of(Step)) for one in self.processes]
        return min(counts, default=0)

    @cached_property
    def apart(self) -> str:
        """How many steps the ranks took alone before DDP, if these numbers differ."""
        first = {x.rank: [y.step for y in x.of(Wraps)][:1] for x in self.processes}
        if not all(first.values()) or len({*map(tuple, first.values())}) == 1:
            return ""
        told = " and ".join(f"rank {x} takes {first[x][0]}" for x in sorted(first))
        return f"{told} steps before the script wraps a network in DDP"

    @property
    def emulated(self) -> bool:
        """Whether `--cpu` emulated the GPUs."""
        starts = self.of(Start)
        return any(one.environment.get("DOCTOR_CPU") is not None for one in starts)

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Return all processes' events of one kind, sorted by time."""
        found = [one for process in self.processes for one in process.of(kind)]
        return sorted(found, key=lambda one: one.time)

    def rows(self, kind: type[Kind]) -> list[list[Kind]]:
        """Return rows of events, one per rank, for steps in which all ranks wrote one.

        If ranks wrote several events in a step, their n-th events form a row.
        """
        numbered = {}
        for process in self.processes:
            for _, group in groupby(process.of(kind), key=lambda one: one.step):
                for number, one in enumerate(group):
                    numbered.setdefault((one.step, number), []).append(one)
        rows = [numbered[key] for key in sorted(numbered)]
        return [row for row in rows if len(row) == len(self.processes)]


def read(folder: Path) -> Job:
    """Read the events of all processes that trained or joined a process group."""
    files = {path.stem: event.read(path) for path in folder.glob("*.events")}
    found, latest = {}, {}
    for name, events in files.items():
        kinds = {type(one): one for one in events}
        given = kinds[Start].environment if Start in kinds else {}
        asked = kinds.get(Joins)
        rank, size = (max(0, asked.number), asked.world_size) if asked else (0, 1)
        if joined := kinds.get(Rank):
            found[name] = Process(joined.own, joined.world_size, events)
        elif asked or Step in kinds or (Failed in kinds and given.get("RANK")):
            rank, size = int(given["RANK"] or rank), int(given["WORLD_SIZE"] or size)
            found[name] = Process(rank, size, events)
    for name, events in files.items():
        parent = events[0].parent if events and isinstance(events[0], Start) else None
        if name not in found and parent in found:
            found[parent].loaders += events
    # If several processes have the same rank, keep the one with the most events
    for process in sorted(found.values(), key=lambda one: len(one.events)):
        if other := latest.get(process.rank):
            process.others = other.others + other.events
        latest[process.rank] = process
    for process in latest.values():
        for one in process.events + process.loaders:
            one.rank = process.rank
    return Job([latest[rank] for rank in sorted(latest)])


def clashing(job: Job) -> list[Joins]:
    """Return pending Joins of processes that request the same rank, or [] if none."""
    found = {}
    for process in job.processes if not job.of(Rank) else ():
        for one in process.of(Joins)[:1]:
            found.setdefault(one.number, []).append(one)
    return next((same for same in found.values() if len(same) > 1), [])


def waiting(process: Process) -> Waits | None:
    """Return a process's last event if it is a wait in a known call, else None."""
    events = [x for x in process.events if not isinstance(x, (Exit, Failed))]
    if process.of(Exit):  # if doctor ended it, exit functions may write later events
        last = events[-1].time
        long = [x for x in process.of(Waits) if x.seconds > 20 and last - x.time < 6]
        events += long[-1:]
    one = events[-1] if events else None
    return one if isinstance(one, Waits) and one.what else None


def errors(job: Job) -> list[Failed]:
    """Return the errors that ended processes, with errors caused by others last."""
    return sorted(job.of(Failed), key=lambda one: bool(LOST.search(one.text)))


def ended(job: Job) -> list[Process]:
    """Return the processes that ended normally."""
    return [one for one in job.processes if one.of(Exit) and not one.of(Failed)]


def stuck(job: Job) -> bool:
    """Return whether all processes were waiting when doctor or Ctrl-C ended them."""
    waits = [waiting(process) for process in job.processes]
    waits = all(one and one.seconds > 20 for one in waits) and job.world_size > 1
    return job.hung or (job.interrupted and waits)


def behind(job: Job, without: Process, call: Event) -> bool:
    """Return whether a rank is past the batch at which another rank made a call."""
    own = next(one for one in job.processes if one.rank == call.rank)
    read = sum(one.time < call.time for one in own.trained)
    return 0 < read < len(without.trained)
