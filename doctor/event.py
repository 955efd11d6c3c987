"""Define the events that a job's processes record, and store and read them.

Each law in laws/ defines its own events as dataclasses. A process writes an event's
class name and fields, from which `read()` creates the same event. Fields are plain
Python values, lists, dictionaries and arrays.
"""

import pickle
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

KINDS: dict[str, type["Event"]] = {}


@dataclass(kw_only=True)
class Event:
    """Something that happened in one process."""

    limit: ClassVar[int] = 10_000  # largest number of such events per process
    name_in_files: ClassVar[str]
    time: float = 0.0  # seconds since the epoch
    step: int = 0  # optimizer steps that the process had completed
    rank: int = -1  # Job.read() sets it

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        # The job's processes import the package under another name
        cls.name_in_files = f"{cls.__module__.partition('.')[2]}.{cls.__name__}"
        KINDS[cls.name_in_files] = cls

    def packed(self) -> bytes:
        """Return the event as bytes for `read()`."""
        return pickle.dumps((type(self).name_in_files, vars(self)))


@dataclass(kw_only=True)
class Start(Event):
    """A process has started."""

    parent: str  # the name of its parent's event file
    host: str
    environment: dict[str, str | None]  # a launcher's variables, such as RANK


@dataclass(kw_only=True)
class Joins(Event):
    """The script joins a process group."""

    own: int  # the port, unless it is the launcher's
    number: int  # the rank that the process requests
    world_size: int
    local: bool = False  # the processes meet at an address of this machine
    place: str


@dataclass(kw_only=True)
class Rank(Event):
    """A process has joined a process group."""

    own: int  # the process's rank
    world_size: int


@dataclass(kw_only=True)
class Compiles(Event):
    """The script calls torch.compile(), after which its draws are not recorded."""

    limit: ClassVar[int] = 1


@dataclass(kw_only=True)
class Waits(Event):
    """A process has waited for `seconds`."""

    limit: ClassVar[int] = 100_000
    what: str  # the function in which the process waits, or ""
    place: str
    seconds: float


@dataclass(kw_only=True)
class Failed(Event):
    """An exception ends the process."""

    text: str
    place: str
    path: str  # the missing file, if the error names one
    cuda: bool = True  # whether PyTorch finds a GPU


@dataclass(kw_only=True)
class Exit(Event):
    """The process ends."""


def read(path: Path) -> list[Event]:
    """Return a process's events, in the order in which it wrote them."""
    found = []
    with path.open("rb") as file, suppress(EOFError, pickle.PickleError):
        while True:
            kind, fields = pickle.load(file)
            found.append(KINDS[kind](**fields))
    return found
