"""What the processes of a job record: the base of all events, and how they are stored.

Each law of laws/ defines its own events as dataclasses. A process writes an event as
its class's name and its fields; `read()` makes the same event of them. Fields are
plain Python values, lists, dictionaries and arrays.
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

    limit: ClassVar[int] = 10_000  # a process writes at most this many of one kind
    name_in_files: ClassVar[str]
    time: float = 0.0  # seconds since the epoch
    step: int = 0  # optimizer steps that the process had completed
    rank: int = -1  # filled in when the job is read

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        # In the job, the package has another name
        cls.name_in_files = f"{cls.__module__.partition('.')[2]}.{cls.__name__}"
        KINDS[cls.name_in_files] = cls

    def packed(self) -> bytes:
        """Return the bytes that `read()` reads."""
        return pickle.dumps((type(self).name_in_files, vars(self)))


@dataclass(kw_only=True)
class Start(Event):
    """A process writes its first event."""

    parent: str  # the name of its parent's file
    host: str
    environment: dict[str, str | None]  # what a launcher sets: RANK and others


@dataclass(kw_only=True)
class Joins(Event):
    """The script joins a process group."""

    own: int  # the port, if it is not the launcher's
    number: int  # the rank that the process asks for
    world_size: int
    local: bool = False  # the processes meet at an address of this machine
    place: str


@dataclass(kw_only=True)
class Rank(Event):
    """A process has joined a process group."""

    own: int  # its rank
    world_size: int


@dataclass(kw_only=True)
class Compiles(Event):
    """The script calls torch.compile(), after which its draws are not recorded."""

    limit: ClassVar[int] = 1


@dataclass(kw_only=True)
class Waits(Event):
    """A process has done nothing for `seconds`."""

    limit: ClassVar[int] = 100_000
    what: str  # the function in which it waits, or ""
    place: str
    seconds: float


@dataclass(kw_only=True)
class Failed(Event):
    """An exception ends the process."""

    text: str
    place: str
    path: str  # the missing file, for errors that have one
    cuda: bool = True  # whether PyTorch finds a GPU


@dataclass(kw_only=True)
class Exit(Event):
    """The process ends."""

    watched: int  # steps


def read(path: Path) -> list[Event]:
    """Return a process's events, in the order they were written."""
    found = []
    with path.open("rb") as file, suppress(EOFError, pickle.PickleError):
        while True:
            kind, fields = pickle.load(file)
            found.append(KINDS[kind](**fields))
    return found
