"""Read the states of random generators, and find the lines that set them."""

import random
import sys

from .event import Event, Exit
from .record import torch
from .sample import digest

GENERATORS = {"torch": "PyTorch", "random": "random", "numpy": "NumPy", "cuda": "CUDA"}


class Seed(Event, limit=300):
    """The script has set a generator's state."""

    generator: str
    call: str
    place: str
    state: int = 0  # a hash of the state that torch.set_rng_state() has set


def called(name: str) -> str:
    """Return a generator's name as findings show it."""
    return GENERATORS.get(name, name.replace("its ", "the dataset's "))


def cause(job, name: str, pair: list[Event]) -> tuple[str, str]:
    """Return the line that last set a generator, and its call if equal on all ranks."""
    found = []
    for draw in pair:
        process = next(x for x in job.processes if x.rank == draw.rank)
        works = getattr(draw, "worker", None) is not None
        own = process.loaders if works else process.events
        seeds = [x for x in own if isinstance(x, Seed) and x.generator == name]
        earlier = [x for x in seeds if x.time <= draw.time]
        kinds = {(x.place, "state" in x.call) for x in earlier[-2:]}
        if len({place for place, _ in kinds}) < len(kinds):  # as in Lightning
            earlier = [x for x in earlier[-2:] if "state" not in x.call]
        found.append(earlier[-1] if earlier else None)
    place = found[0].place if found[0] else pair[0].place
    if found[0] and len({one and one.call for one in found}) == 1:
        return place, f", since {found[0].call} on each rank"
    return place, ""


def one_state(job) -> Seed | None:
    """Return rank 0's event if all ranks last set PyTorch's generator to one state."""
    every = [p.of(Seed) for p in job.processes if len(p.of(Seed)) < Seed.limit]
    lists = [[x for x in own if x.generator == "torch"] for own in every]
    row = [own[-1] for own in lists if own]
    same = len({(x.state, x.step) for x in row}) == 1 < len(row) == len(job.processes)
    last = max((one.step for one in job.of(Exit)), default=0)
    return row[0] if same and row[0].state and last > row[0].step else None


def states(dataset: object = None) -> dict[str, tuple[int, int]]:
    """Return {name: (state's hash, position)} for global and a dataset's generators."""
    state = bytes(torch.random.default_generator.get_state().tolist())
    found = {"torch": (digest(state), int.from_bytes(state[16:20], "little"))}
    state = random.getstate()[1]
    found["random"] = hash(state), state[-1]
    if numpy := sys.modules.get("numpy"):
        _, keys, position, *_ = numpy.random.get_state()
        found["numpy"] = digest(keys.tobytes(), position), position
    if torch.cuda.is_initialized():
        state = bytes(torch.cuda.get_rng_state().tolist())
        found["cuda"] = digest(state), int.from_bytes(state[8:16], "little")
    for name, own in getattr(dataset, "__dict__", {}).items():
        if (state := state_of(own)) is not None:
            found[f"its {name}"] = state, 0
    return found


def state_of(generator) -> int | None:
    """Return a hash of a PyTorch, Python or NumPy generator's state; else None."""
    if isinstance(generator, torch.Generator):
        return digest(generator.get_state().tolist())
    if isinstance(generator, random.Random):
        return digest(generator.getstate())
    numpys = getattr(generator, "_bit_generator", None)  # NumPy's two kinds have it
    return None if numpys is None else digest(numpys.state)


def drawn(before: dict, after: dict) -> tuple[dict[str, int], int]:
    """Return {name: old hash} of generators that drew, and the minimum draw count."""
    changed = {k: x for k, x in before.items() if k in after and after[k] != x}
    moved = {name: after[name][1] - position for name, (_, position) in changed.items()}
    counts = [n if name == "cuda" else n % 624 or 624 for name, n in moved.items()]
    return {name: state for name, (state, _) in changed.items()}, max(counts, default=0)
