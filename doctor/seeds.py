"""Where a random generator got its state."""

from dataclasses import dataclass
from typing import ClassVar

from .event import Event

GENERATORS = {"torch": "PyTorch", "random": "random", "numpy": "NumPy", "cuda": "CUDA"}


@dataclass(kw_only=True)
class Seed(Event):
    """The script has set a generator's state."""

    limit: ClassVar[int] = 300
    generator: str
    call: str
    place: str


def called(name: str) -> str:
    """Return what a finding calls a generator."""
    return GENERATORS.get(name, name.replace("its ", "the data set's "))


def setting(job, name: str, draw: Event) -> Seed | None:
    """Return what set a generator last before a draw, in the same process."""
    process = next(x for x in job.processes if x.rank == draw.rank)
    works = getattr(draw, "worker", None) is not None
    own = process.loaders if works else process.events
    own = [x for x in own if isinstance(x, Seed) and x.generator == name]
    return next((x for x in reversed(own) if x.time <= draw.time), None)


def cause(job, name: str, pair: list[Event]) -> tuple[str, str]:
    """Return the line that last set a generator and, if all ranks made it, the call."""
    found = [setting(job, name, one) for one in pair]
    calls = {one and one.call for one in found}
    place = found[0].place if found[0] else pair[0].place
    if len(calls) == 1 and found[0]:
        return place, f", since {found[0].call} on each rank"
    return place, ""
