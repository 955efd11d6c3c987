"""Read the states of random generators, and find the lines that set them."""

import ctypes
import hashlib
import random
import sys

from .event import Event
from .record import torch

GENERATORS = {"torch": "PyTorch", "random": "random", "numpy": "NumPy", "cuda": "CUDA"}


class Seed(Event, limit=300):
    """The script has set a generator's state."""

    generator: str
    call: str
    place: str


def called(name: str) -> str:
    """Return a generator's name as findings show it."""
    return GENERATORS.get(name, name.replace("its ", "the dataset's "))


def setting(job, name: str, draw: Event) -> Seed | None:
    """Return the last Seed event of a generator before a draw in the same process."""
    process = next(x for x in job.processes if x.rank == draw.rank)
    works = getattr(draw, "worker", None) is not None
    own = process.loaders if works else process.events
    own = [x for x in own if isinstance(x, Seed) and x.generator == name]
    return next((x for x in reversed(own) if x.time <= draw.time), None)


def cause(job, name: str, pair: list[Event]) -> tuple[str, str]:
    """Return the line that last set a generator, and its call if equal on all ranks."""
    found = [setting(job, name, one) for one in pair]
    calls = {one and one.call for one in found}
    place = found[0].place if found[0] else pair[0].place
    if len(calls) == 1 and found[0]:
        return place, f", since {found[0].call} on each rank"
    return place, ""


def states(dataset: object = None) -> dict[str, tuple[int, int]]:
    """Return {name: (state's hash, position)} for global and a dataset's generators."""
    state = content(torch.random.default_generator.get_state())
    found = {"torch": (hashed(state), int.from_bytes(state[16:20], "little"))}
    state = random.getstate()[1]
    found["random"] = hash(state), state[-1]
    if numpy := sys.modules.get("numpy"):
        _, keys, position, *_ = numpy.random.get_state()
        state = keys.tobytes() + str(position).encode()
        found["numpy"] = hashed(state), position
    if torch.cuda.is_initialized():
        state = content(torch.cuda.get_rng_state())
        found["cuda"] = hashed(state), int.from_bytes(state[8:16], "little")
    for name, own in getattr(dataset, "__dict__", {}).items():
        bits = getattr(own, "bit_generator", getattr(own, "_bit_generator", None))
        if isinstance(own, torch.Generator):
            found[f"its {name}"] = hashed(content(own.get_state())), 0
        elif isinstance(own, random.Random):
            found[f"its {name}"] = hash(own.getstate()[1]), 0
        elif bits is not None:
            found[f"its {name}"] = hashed(repr(bits.state).encode()), 0
    return found


def content(state) -> bytes:
    """Return the bytes of a generator's state (a CPU tensor), without NumPy."""
    return ctypes.string_at(state.data_ptr(), state.numel())


def hashed(state: bytes) -> int:
    """Return a hash of a generator's state."""
    return int.from_bytes(hashlib.blake2b(state, digest_size=7).digest(), "big")


def drawn(before: dict, after: dict) -> tuple[dict[str, int], int]:
    """Return {name: old hash} of generators that drew, and the minimum draw count."""
    changed = {k: x for k, x in before.items() if k in after and after[k] != x}
    counts = [0]
    for name, (_, position) in changed.items():
        moved = after[name][1] - position
        counts.append(moved if name == "cuda" else moved % 624 or 624)
    return {name: value[0] for name, value in changed.items()}, max(counts)
