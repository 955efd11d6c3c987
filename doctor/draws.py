"""The random numbers that the script draws itself, and its own generators."""

import contextlib
import ctypes
import gc
import hashlib
import os
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import ClassVar

from .event import Event
from .job import Job
from .moments import runs_normally
from .neighbours import Input
from .record import not_the_users, place, recorder, wrap
from .sample import digest, numbers
from .watcher import Watcher

MANY = 8  # fewer equal numbers per draw may be a decision of all ranks
FUNCTIONS = """rand randn randint randperm rand_like randn_like normal bernoulli
    multinomial""".split()
METHODS = (
    "uniform_ normal_ bernoulli_ exponential_ random_ bernoulli multinomial".split()
)
MADE = "from_numpy tensor as_tensor".split()  # perhaps of another generator's numbers
SCANS = 3, 4  # the steps after which the script's generators are looked at


@dataclass(kw_only=True)
class Drawn(Event):
    """A line of the script has drawn random numbers, or made a tensor of numbers."""

    limit: ClassVar[int] = 2000
    name: str
    place: str
    number: int  # in this step and line
    value: int  # a hash of a few of the numbers
    size: int  # of the first dimension
    whole: bool  # they are whole numbers
    permutes: bool = False  # they are 0 to size - 1, in another order


@dataclass(kw_only=True)
class Own(Event):
    """States of the generators that the script has made itself, the oldest first."""

    states: list[int]
    # Where a class of the script begins whose objects have them, or ""
    owners: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Global(Event):
    """States of the global generators of Python and NumPy, after a step."""

    states: list[int]


@dataclass(kw_only=True)
class Made(Event):
    """The script has made a generator of NumPy."""

    limit: ClassVar[int] = 400
    state: int  # a hash
    place: str


def states(dataset: object = None) -> dict[str, tuple[int, int]]:
    """Return a hash and the position of each global generator, and a data set's own."""
    import torch

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
    """Return the bytes of a generator's state, a CPU tensor; NumPy may be missing."""
    return ctypes.string_at(state.data_ptr(), state.numel())


def hashed(state: bytes) -> int:
    """Return a hash of a generator's state."""
    return int.from_bytes(hashlib.blake2b(state, digest_size=7).digest(), "big")


def drawn(before: dict, after: dict) -> tuple[dict[str, int], int]:
    """Return the hashes of generators that drew, and a lower bound on the draws."""
    changed = {k: x for k, x in before.items() if k in after and after[k] != x}
    counts = [0]
    for name, (_, position) in changed.items():
        moved = after[name][1] - position
        counts.append(moved if name == "cuda" else moved % 624 or 624)
    return {name: value[0] for name, value in changed.items()}, max(counts)


class Draws(Watcher):
    """Looks at results of functions that draw, and at generators."""

    def __init__(self):
        self.counts, self.inside, self.shared = Counter(), False, False

    def hooks(self) -> None:
        import torch

        for name in FUNCTIONS:
            wrap(torch, name, partial(self.draw, name))
        for name in METHODS:
            wrap(torch.Tensor, name, partial(self.draw, name))
        for name in MADE:
            wrap(torch, name, partial(self.make, name))
        if numpy := sys.modules.get("numpy"):
            wrap(numpy.random, "default_rng", self.generator)

    def on_collective(self, name, args, kwargs, where) -> None:
        frame = sys._getframe(1)
        while frame and "distributed/optim" not in frame.f_code.co_filename:
            frame = frame.f_back
        self.shared |= frame is None  # ZeRO's step sends weights only

    def after_step(self, optimizer, weights) -> None:
        self.shared = False
        if recorder.step in SCANS:
            recorder.write(own_states())
            known = [x for k, (x, _) in states().items() if k in ("random", "numpy")]
            recorder.write(Global(states=known))
        self.counts = Counter()

    def make(self, name: str, call, /, *args, **kwargs):
        result = call(*args, **kwargs)
        if not recorder.watching or self.shared or not runs_normally():
            return result
        if result.is_floating_point() or permutes(result):
            self.keep(name, result)
        return result

    def generator(self, call, *args, **kwargs):
        result = call(*args, **kwargs)
        if recorder.watching and not recorder.full(Made) and not importing():
            state = hashed(repr(result.bit_generator.state).encode())
            recorder.write(Made(state=state, place=place()))
        return result

    def draw(self, name: str, call, /, *args, **kwargs):
        nested, self.inside = self.inside, True
        try:
            result = call(*args, **kwargs)
        finally:
            self.inside = nested
        self.keep(name, result)
        return result

    def keep(self, name: str, result) -> None:
        """Record a few numbers of a tensor."""
        watching = recorder.watching and recorder.step and not recorder.full(Drawn)
        if self.inside or not watching or result.numel() < MANY or not runs_normally():
            return
        file = sys._getframe(3).f_code.co_filename
        if file.startswith(not_the_users()) and "distributions" not in file:
            return
        where = place()
        drawn = Drawn(
            name=name,
            place=where,
            number=self.counts[where],
            value=digest(numbers([result], 16)),
            size=len(result) if result.dim() else 1,
            whole=not result.is_floating_point(),
            permutes=permutes(result),
        )
        self.counts[where] += 1
        recorder.write(drawn)


def importing() -> bool:
    """Return whether an installed library is being imported."""
    frame = sys._getframe(1)
    while frame:
        code = frame.f_code
        if code.co_name == "<module>" and "-packages" in code.co_filename:
            return True
        frame = frame.f_back
    return False


def permutes(tensor) -> bool:
    """Return whether a tensor has the numbers 0 to N - 1: (N,)."""
    if tensor.dim() != 1 or tensor.is_floating_point() or not 1 < len(tensor) < 4096:
        return False
    return sorted(tensor.tolist()) == [*range(len(tensor))]


def own_states() -> Own:
    """Return hashes of the states of all generators but the global ones."""
    numpy, found, made = sys.modules.get("numpy"), [], []
    kinds = (numpy.random.Generator, numpy.random.RandomState) if numpy else ()
    for one in (x for age in (2, 1, 0) for x in gc.get_objects(age)):
        if type(one) is random.Random and one is not random._inst:
            made.append(one)
            found.append(hashed(repr(one.getstate()).encode()))
        elif type(one) in kinds and one is not numpy.random.mtrand._rand:
            made.append(one)
            found.append(hashed(repr(one._bit_generator.state).encode()))
    own = Own(states=found)
    with contextlib.suppress(Exception):  # an unusual object of the script
        own.owners = owners(made)
    return own


def owners(made: list) -> list[str]:
    """Return where the class begins whose object has a generator, or ""."""
    found = {id(one): "" for one in made}
    direct = gc.get_referrers(*made) if made else []
    fields = [one for one in direct if type(one) is dict]
    for one in direct + (gc.get_referrers(*fields) if fields else []):
        code = getattr(getattr(type(one), "__init__", None), "__code__", None)
        if code and not code.co_filename.startswith(not_the_users()):
            where = f"{os.path.relpath(code.co_filename)}:{code.co_firstlineno}"
            held = [x for x in getattr(one, "__dict__", {}).values() if id(x) in found]
            found |= {id(x): where for x in held}
    return [*found.values()]


def same_draws(job: Job) -> tuple[dict[str, tuple[str, bool]], int]:
    """Return, by line, what ranks draw equally in most steps, and if it may be right.

    The second value is the number of draws that differ on all ranks.
    """
    rows, found, differ = [], {}, 0
    for process in job.processes:
        own = {}
        for one in process.of(Drawn):
            own.setdefault((one.place, one.number), {})[one.step] = one
        rows.append(own)
    watched = len({one.step for one in job.of(Drawn)})
    batch = max((len(one.rows) for one in job.of(Input)), default=10**9)
    for key, first in rows[0].items():
        draws = [own.get(key, {}) for own in rows]
        steps = [step for step in first if all(step in own for own in draws)]
        same = [step for step in steps if equal([own[step].value for own in draws])]
        values = {first[step].value for step in same}
        differ += len(steps) - len(same)
        often = len(same) >= max(3, watched / 3, len(steps) / 2)
        often = often or (len(same) > 7 and same[-8:] == steps[-8:])
        if often and len(values) > 0.9 * len(same):
            one = first[same[0]]
            what = f"in {len(same)} of {len(steps)} steps, torch.{one.name}() gives "
            parts = one.size >= len(rows) * batch  # perhaps each rank takes its part
            text = f"{what}the same numbers on several ranks"
            if found.get(one.place, ("", True))[1]:  # noise counts more than numbers
                own = one.permutes and one.size == batch  # partners in a batch
                found[one.place] = text, not own and (one.whole or parts)
    return found, differ


def equal(values: list) -> bool:
    """Return whether two values are equal."""
    return any(one == other for one, other in combinations(values, 2))


def draws_in_steps(job: Job) -> bool:
    """Return whether the script draws between steps, other than PyTorch's fractions."""
    process = job.processes[0]
    for kind in (Own, Global):
        scans = [{*one.states} for one in process.of(kind)[:2]]
        if len(scans) > 1 and scans[0] - scans[1]:
            return True
    drawn = {one.step for one in process.of(Drawn) if one.whole}
    return len(drawn) > len({one.step for one in process.of(Input)}) / 2


def equal_owners(job: Job) -> tuple[str, str, str]:
    """Return how generators of several objects of a class draw the same, if they do.

    The other values are the place and the advice. A joint decision needs one generator
    at the same place on all ranks.
    """
    ranks = []
    for process in job.processes:
        one, later = [*process.of(Own)[:2], None, None][:2]
        pairs = zip(one.states, one.owners, strict=False) if later else ()
        ranks.append([pair for pair in pairs if pair[0] not in later.states])
    for (n, one), (m, other) in combinations(enumerate(ranks), 2):
        for where in {owner: None for _, owner in one if owner}:
            own = [state for state, owner in one if owner == where]
            others = [state for state, owner in other if owner == where]
            same = [(k, others.index(x)) for k, x in enumerate(own) if x in others]
            shifts = {there - here for here, there in same}
            if len(same) < 3 - (0 not in shifts) or len(shifts) > 1:
                continue
            text = f"{len(same)} of {len(own)} generators of rank {n} draw the same "
            text += f"numbers as rank {m}'s"
            if 0 in shifts:
                return text, where, "Seed them with numbers that depend on the rank."
            text += f": number {same[0][0] + 1} as its number {same[0][1] + 1}"
            mend = "Give each rank seeds of its own: seed + rank * (their number) + i."
            return text, where, mend
    return "", "", ""


def same_generators(job: Job) -> bool:
    """Return whether ranks have own generators that draw the same in each step."""
    found, made = [], Counter()
    for process in job.processes:
        scans = [{*one.states} for one in process.of(Own)]
        pairs = zip(scans, scans[1:], strict=False)
        found.append([one - later for one, later in pairs])  # those that drew
    columns = [*zip(*found, strict=False)]
    same = [any(a & b for a, b in combinations(x, 2)) for x in columns]
    for row in job.rows(Made):
        made[row[0].place] += equal([one.state for one in row])
    often = max(3, len({one.step for one in job.of(Input)}) / 2)
    return (bool(same) and all(same)) or any(x > often for x in made.values())
