"""Record the random numbers that the script draws, and the states of generators."""

import contextlib
import gc
import os
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, pairwise
from traceback import walk_stack

from .event import Event
from .generators import hashed, states
from .job import Job
from .moments import runs_normally
from .neighbours import Input
from .record import not_the_users, place, recorder, torch, wrap
from .sample import digest, numbers
from .watcher import Watcher

MANY = 8  # fewer equal numbers than this may be a joint decision of the ranks
FUNCTIONS = """rand randn randint randperm rand_like randn_like normal bernoulli
    multinomial""".split()
METHODS = """uniform_ normal_ bernoulli_ exponential_ random_ bernoulli
    multinomial""".split()
MADE = "from_numpy tensor as_tensor".split()  # may contain NumPy's random numbers
SCANS = 3, 4  # after these steps, doctor reads the script's generators


class Drawn(Event, limit=2000):
    """A line of the script has drawn random numbers, or made a tensor from numbers."""

    name: str
    place: str
    number: int  # the draw's index in this step and line
    value: int  # a hash of a few of the numbers
    size: int  # the first dimension's size
    whole: bool  # the numbers are integers
    permutes: bool = False  # the numbers are a permutation of 0 to size - 1
    own: bool = False  # the script passed its own generator


class Own(Event):
    """The states of the generators that the script has created, oldest first."""

    states: list[int]
    # For each generator, the line of the class whose object holds it, or ""
    owners: list[str] = field(default_factory=list)


class Global(Event):
    """The states of Python's and NumPy's global generators after a step."""

    states: list[int]


class Made(Event, limit=400):
    """The script has created a NumPy generator."""

    state: int  # a hash of the generator's state
    place: str


class Draws(Watcher):
    """Records the random numbers that functions return, and the generators' states."""

    def __init__(self):
        self.counts, self.inside, self.shared = Counter(), False, False

    def hooks(self) -> None:
        for name in FUNCTIONS:
            wrap(torch, name, partial(self.draw, name))
        for name in METHODS:
            wrap(torch.Tensor, name, partial(self.draw, name))
        for name in MADE:
            wrap(torch, name, partial(self.make, name))
        if numpy := sys.modules.get("numpy"):
            wrap(numpy.random, "default_rng", self.generator)

    def on_collective(self, name, args, kwargs, where) -> None:
        files = [one.f_code.co_filename for one, _ in walk_stack(sys._getframe(1))]
        # ZeRO's step sends only weights
        self.shared |= not any("distributed/optim" in one for one in files)

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
        self.keep(name, result, kwargs.get("generator") is not None)
        return result

    def keep(self, name: str, result, own: bool = False) -> None:
        """Record a hash of a few of a tensor's numbers."""
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
            own=own,
        )
        self.counts[where] += 1
        recorder.write(drawn)


def importing() -> bool:
    """Return whether Python is importing an installed library."""
    codes = [one.f_code for one, _ in walk_stack(sys._getframe(1))]
    return any(x.co_name == "<module>" and "-packages" in x.co_filename for x in codes)


def permutes(tensor) -> bool:
    """Return whether a tensor (N,) is a permutation of 0 to N - 1."""
    if tensor.dim() != 1 or tensor.is_floating_point() or not 1 < len(tensor) < 4096:
        return False
    return sorted(tensor.tolist()) == [*range(len(tensor))]


def own_states() -> Own:
    """Return hashes of the states of all generators except the global ones."""
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
    with contextlib.suppress(Exception):  # a script's object may raise anything
        own.owners = owners(made)
    return own


def owners(made: list) -> list[str]:
    """Return the line of each generator owner's __init__(), or "" if it has none."""
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


@dataclass
class Same:
    """A line of the script that draws the same numbers on several ranks."""

    what: str
    together: bool  # the ranks may be meant to draw the same
    draws: list[Drawn]  # the first equal draws, one per rank
    late: bool  # the ranks' earlier draws differ


def since(same: list[bool], least: float = 3) -> int | None:
    """Return the index of the ranks' first equal draw, or None if too few are equal.

    Half of the draws (and at least `least`), 8 in a row, or the last 3 are enough.
    """
    if sum(same) >= max(least, len(same) / 2):
        return same.index(True)
    text = "".join("01"[one] for one in same)
    if (found := text.find("1" * 8)) >= 0:
        return found
    found = len(text.rstrip("1"))
    return found if 0 < found < len(text) - 2 else None


def same_draws(job: Job) -> tuple[dict[str, Same], int]:
    """Return {line: the ranks' equal draws}, and the number of draws that differ."""
    rows, found, differ = [], {}, 0
    for process in job.processes:
        own = {}
        for one in process.of(Drawn):
            own.setdefault((one.place, one.number), {})[one.step] = one
        rows.append(own)
    watched = len({one.step for one in job.of(Drawn)})
    batch = max((len(one.rows) for one in job.of(Input)), default=10**9)
    passes = len({one.step for one in job.of(Input)})
    for key, first in rows[0].items():
        draws = [own.get(key, {}) for own in rows]
        steps = [step for step in first if all(step in own for own in draws)]
        same = [len({own[n].value for own in draws}) < len(draws) for n in steps]
        differ += len(same) - sum(same)
        if (start := since(same, max(3, watched / 3))) is None:
            continue
        equals = [step for step, one in zip(steps, same, strict=True) if one]
        row = [own[steps[start]] for own in draws]
        one, values = row[0], [first[step].value for step in equals]
        changes = sum(a != b for a, b in pairwise(values)) + 1
        changes = len({*values}) if one.name in MADE else changes
        earlier = found.get(one.place)  # noise is stronger evidence
        if changes > 0.9 * len(values) and (earlier is None or earlier.together):
            what = f"in {len(equals)} of {len(steps)} steps, torch.{one.name}() gives "
            what += "the same numbers on several ranks"
            if late := start > 2:
                what = f"from step {one.step + 1} on, {what}"
            parts = one.size >= len(rows) * batch  # perhaps each rank takes its part
            # Such as mixup's permutation, not one of all samples in each epoch
            own = one.permutes and one.size == batch and len(steps) > passes / 3
            together = not own and (one.whole or parts)
            found[one.place] = Same(what, together, row, late)
    return found, differ


def other_orders(job: Job, least: int) -> str:
    """Return a line that draws different permutations on the ranks, or "" for none."""
    for row in job.rows(Drawn):
        same = len({one.place for one in row}) == 1 and row[0].size > least
        if same and row[0].permutes and len({one.value for one in row}) > 1:
            return row[0].place
    return ""


def equal_owners(job: Job) -> tuple[str, str, str]:
    """Return (message, place, advice) if objects on two ranks draw the same numbers.

    Otherwise, return three empty strings. One or two equal generators, at the same
    positions on all ranks, may be meant for joint decisions.
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
                return text, where, "Seed each with a number that depends on the rank."
            text += f": number {same[0][0] + 1} those of its number {same[0][1] + 1}"
            mend = "Give each rank its own seeds: seed + rank * (number of seeds) + i."
            return text, where, mend
    return "", "", ""


def same_generators(job: Job) -> str | None:
    """Return the line of generators that draw the same numbers on several ranks.

    Return "" if their line is unknown, and None if there are no such generators.
    """
    for kind in (Own, Global):
        scans = [process.of(kind)[:2] for process in job.processes]
        drew = [{*x[0].states} - {*x[-1].states} for x in scans if x]
        for one, other in combinations(drew, 2):
            for state in one & other:
                first = scans[0][0]
                places = vars(first).get("owners", ())
                return dict(zip(first.states, places, strict=False)).get(state, "")
    made = Counter()
    for row in job.rows(Made):
        made[row[0].place] += len({one.state for one in row}) < len(row)
    often = max(3, len({one.step for one in job.of(Input)}) / 2)
    return next((place for place, count in made.items() if count > often), None)
