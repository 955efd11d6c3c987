"""Define, write and read the events that a job's processes record.

Each law in laws/ defines its own events. A process writes an event's class name and
fields, from which `read()` recreates the event. Fields are plain Python values,
lists, dictionaries and arrays.
"""

import pickle
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

KINDS: dict[str, type["Event"]] = {}


@dataclass(kw_only=True)
class Event:
    """Something that happened in one process.

    Each kind of event is a subclass: it becomes a dataclass with keyword-only fields.
    A kind's `limit` is the maximum number of its events per process.
    """

    limit: ClassVar[int]
    name_in_files: ClassVar[str]
    time: float = 0.0  # seconds since the epoch
    step: int = 0  # optimizer steps that the process had completed
    rank: int = -1  # read() in job.py sets it

    def __init_subclass__(cls, limit: int = 10_000):
        dataclass(kw_only=True)(cls)
        cls.limit = limit
        # The job's processes import the package under another name
        cls.name_in_files = f"{cls.__module__.partition('.')[2]}.{cls.__name__}"
        KINDS[cls.name_in_files] = cls

    def packed(self) -> bytes:
        """Return the event as bytes for `read()`."""
        return pickle.dumps((type(self).name_in_files, vars(self)))


class Start(Event):
    """A process has started."""

    parent: str  # the name of its parent's event file
    host: str
    environment: dict[str, str | None]  # a launcher's variables, such as RANK


class Joins(Event):
    """The script joins a process group."""

    own: int  # the port, if the script chose it, or 0
    number: int  # the rank that the process requests
    world_size: int
    local: bool = False  # the processes meet at an address of this machine
    place: str


class Rank(Event):
    """A process has joined a process group."""

    own: int  # the process's rank
    world_size: int


class Sends(Event, limit=1):
    """The script exchanges a tensor with one other rank."""

    count: int  # number of elements


class Compiles(Event, limit=1):
    """The script calls torch.compile(), after which random draws are not recorded."""


class Waits(Event, limit=100_000):
    """The process has been waiting for `seconds`."""

    what: str  # the function in which the process waits, or ""
    place: str
    seconds: float

    @property
    def text(self) -> str:
        """What a finding says about it."""
        what = "DDP's forward" if self.what == "_sync_buffers" else self.what
        return f"waits in {what}() at {self.place}"


class Failed(Event):
    """An exception has ended the process."""

    text: str
    place: str
    path: str  # the missing file, if the error names one
    cuda: bool = True  # whether PyTorch finds a GPU


class Exit(Event):
    """The process ends."""

    passes: int = 0  # backward passes (and calls of autograd.grad()) in timed steps


def read(path: Path) -> list[Event]:
    """Return a process's events, in the order in which it wrote them."""
    found = []
    with path.open("rb") as file, suppress(EOFError, pickle.PickleError):
        while True:
            kind, fields = pickle.load(file)
            found.append(KINDS[kind](**fields))
    return found
