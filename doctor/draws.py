"""Record the random numbers that the script draws, and the states of generators."""

import gc
import random
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations, pairwise
from traceback import walk_stack

from .event import Event
from .generators import state_of
from .job import Job
from .neighbours import Input
from .record import LIBRARY, not_the_users, place, recorder, runs_normally, torch, wrap
from .results import Measured
from .sample import digest, numbers, positions
from .watcher import Watcher

MANY = 8  # fewer equal numbers than this may be a joint decision of the ranks
FUNCTIONS = """rand randn randint randperm rand_like randn_like normal bernoulli
    multinomial""".split()
METHODS = """uniform_ normal_ bernoulli_ exponential_ random_ bernoulli
    multinomial""".split()
# The results also depend on arguments, which may differ between ranks
PARAMETERS = "normal bernoulli multinomial".split()
MADE = "from_numpy tensor as_tensor".split()  # may contain NumPy's random numbers
SCANS = 3, 4  # after these steps, doctor reads the script's generators


class Drawn(Event, limit=2000):
    """A line of the script has drawn random numbers, or made a tensor from numbers."""

    name: str
    place: str
    number: int  # the draw's index in this step and line
    value: int  # a hash of a few of the numbers, or of the generator's state
    size: int  # the first dimension's size
    whole: bool  # the numbers are integers
    permutes: bool = False  # the numbers are a permutation of 0 to size - 1
    own: bool = False  # the script passed its own generator
    late: bool = False  # after a backward pass, as noise for averaged gradients


class Order(Event, limit=400):
    """A line of the script has shuffled samples, indices or batches of indices."""

    place: str
    size: int  # the number of shuffled things; of all indices, if these are batches
    value: int  # a hash of a few of them, in their new order


class Own(Event):
    """The states of all Python's and NumPy's generators after a step, oldest first."""

    states: list[int]


class Made(Event, limit=400):
    """The script has created a NumPy generator."""

    state: int  # a hash of the generator's state
    place: str


class Draws(Watcher):
    """Records the random numbers that functions return, and the generators' states."""

    kind = None  # the class of generators that numpy's default_rng() returns

    def __init__(self):
        self.counts, self.inside, self.shared = Counter(), False, False
        self.last = None  # the last order: its step and hash
        self.lines = set()  # that drew orders, until their first one after the watch
        self.passes = 0  # number of backward passes before this step

    def hooks(self) -> None:
        for owner, names in ((torch, FUNCTIONS), (torch.Tensor, METHODS)):
            for name in names:
                wrap(owner, name, partial(self.draw, name))
        for name in MADE:
            wrap(torch, name, partial(self.make, name))
        if numpy := sys.modules.get("numpy"):
            wrap(numpy.random, "default_rng", self.generator)
            # A class written in C cannot be changed
            self.kind = type("Generator", (numpy.random.Generator,), {})
            for owner in (numpy.random, self.kind):
                for name in ("permutation", "shuffle"):
                    wrap(owner, name, self.order)
        for owner, name in ((random, "shuffle"), (random, "sample")):
            wrap(owner, name, self.order)
            wrap(random.Random, name, self.order)

    def on_collective(self, name, args, kwargs, where) -> None:
        files = [one.f_code.co_filename for one, _ in walk_stack(sys._getframe(1))]
        # ZeRO's step sends only weights
        self.shared |= not any("distributed/optim" in one for one in files)

    def after_step(self, optimizer, weights) -> None:
        self.shared, self.passes = False, recorder.passes
        if recorder.step in SCANS:
            kinds = [random.Random]
            if numpy := sys.modules.get("numpy"):
                kinds += [numpy.random.Generator, numpy.random.RandomState, self.kind]
            own = [x for n in (2, 1, 0) for x in gc.get_objects(n) if type(x) in kinds]
            recorder.write(Own(states=[*map(state_of, own)]))
        self.counts = Counter()

    def make(self, name: str, call, /, *args, **kwargs):
        result = call(*args, **kwargs)
        if recorder.watching and not self.shared and runs_normally():
            if permuted := permutes(result):
                self.note(result)
            if permuted or result.is_floating_point():
                self.keep(name, result)
        return result

    def order(self, call, *args, **kwargs):
        result = call(*args, **kwargs)
        self.note(args[-1] if result is None else result)
        return result

    def note(self, things) -> None:
        """Record an order that a line of the script has drawn."""
        caller = sys._getframe(3).f_code.co_filename
        known = not caller.startswith((*not_the_users(), LIBRARY)) and runs_normally()
        where = place() if known and (recorder.watching or self.lines) else ""
        used = where and (recorder.watching or where in self.lines)
        if used and not recorder.full(Order):
            size, few = shuffled(things)
            now = (recorder.step, digest(few)) if size >= MANY else self.last
            last, self.last = self.last, now
            if now != last:  # from_numpy() notes it again
                recorder.write(Order(place=where, size=size, value=now[1]))
                (self.lines.add if recorder.watching else self.lines.discard)(where)

    def generator(self, call, *args, **kwargs):
        result = call(*args, **kwargs)
        users = "site-packages" not in sys._getframe(2).f_code.co_filename
        if users and recorder.watching and not recorder.full(Made):
            recorder.write(Made(state=state_of(result), place=place()))
        known = any(one is result for one in (*args, *kwargs.values()))
        return result if known else self.kind(result.bit_generator)

    def draw(self, name: str, call, /, *args, **kwargs):
        nested, self.inside = self.inside, True
        own, state = kwargs.get("generator"), None
        if name in PARAMETERS and recorder.watching and not nested:
            state = (own or torch.random.default_generator).get_state()
        try:
            result = call(*args, **kwargs)
        finally:
            self.inside = nested
        if name == "randperm" and not nested:
            self.note(result)
        self.keep(name, result, own is not None, state if result.is_cpu else None)
        return result

    def keep(self, name: str, result, own: bool = False, state=None) -> None:
        """Record a hash of the generator's state, or of a few of a tensor's numbers."""
        watching = recorder.watching and recorder.step and not recorder.full(Drawn)
        if self.inside or not watching or result.numel() < MANY or not runs_normally():
            return
        file = sys._getframe(3).f_code.co_filename
        if file.startswith(not_the_users()) and "distributions" not in file:
            return
        where, source = place(), [result] if state is None else [state[:24], state]
        drawn = Drawn(
            name=name,
            place=where,
            number=self.counts[where],
            value=digest(numbers(source, 24)),
            size=len(result) if result.dim() else 1,
            whole=not result.is_floating_point(),
            permutes=permutes(result),
            own=own,
            late=recorder.passes > self.passes,
        )
        self.counts[where] += 1
        recorder.write(drawn)


def permutes(tensor) -> bool:
    """Return whether a tensor (N,) is a permutation of 0 to N - 1."""
    if tensor.dim() != 1 or tensor.is_floating_point() or not 1 < len(tensor) < 4096:
        return False
    return sorted(tensor.tolist()) == [*range(len(tensor))]


def shuffled(things) -> tuple[int, list]:
    """Return the number of shuffled things (0: unknown), and a few of them."""
    if hasattr(things, "tolist"):
        return len(things), numbers([torch.as_tensor(things)], 16)
    few = [things[n] for n in positions(len(things), 16)]
    lists = all(isinstance(one, (list, tuple)) for one in few)
    if lists and all(isinstance(x, int) for x in chain(*few)) and len(things) < 10_000:
        inner = [*chain(*things)]
        if sorted(inner) == [*range(len(inner))]:  # batches of indices count as these
            return len(inner), [inner[n] for n in positions(len(inner), 16)]
    parts = [x for one in few for x in (one if isinstance(one, tuple) else (one,))]
    plain = all(isinstance(x, (int, float, str)) for x in parts)
    return len(things) * plain, few


@dataclass
class Same:
    """A line of the script that draws the same numbers on several ranks."""

    what: str
    together: bool  # the ranks may be meant to draw the same
    draws: list[Drawn]  # the first equal draws, one per rank


def since(same: list[bool], least: float = 3) -> int | None:
    """Return the index of the ranks' first equal draw, or None if too few are equal.

    Half of the draws (and at least `least`), 8 in a row, or the last 3 are enough.
    """
    many = sum(same) >= max(least, len(same) / 2)
    text = "".join("01"[one] for one in same)
    found = re.search("1" if many else "1{8}|(?<=0)1{3,}$", text)
    return found.start() if found else None


def same_draws(job: Job) -> tuple[dict[str, Same], int]:
    """Return {line: the ranks' equal draws}, and the number of draws that differ."""
    rows, found, differ = [defaultdict(dict) for _ in job.processes], {}, 0
    for own, process in zip(rows, job.processes, strict=True):
        for one in process.of(Drawn):
            own[one.place, one.number][one.step] = one
    watched = len({one.step for one in job.of(Drawn)})
    batch = max((len(one.rows) for one in job.of(Input)), default=10**9)
    trained = {one.step for one in job.of(Input)}
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
            parts = one.size >= len(rows) * batch  # perhaps each rank takes its part
            # Such as mixup's permutation, not one of all samples in each epoch
            own = one.permutes and one.size == batch and len(steps) > len(trained) / 3
            # Without a pass in these steps, as in evolution strategies
            apart = trained and not trained & {*equals}
            together = one.late or apart or (not own and (one.whole or parts))
            found[one.place] = Same(what, together, row)
    return found, differ


def parts_of_orders(job: Job) -> str:
    """Return a message if ranks read parts of different permutations, else "".

    Between two draws, each rank then reads about N / world_size of N shuffled things
    (samples, or files of samples), so it has not shuffled only its own.
    """
    for line in dict.fromkeys(one.place for one in job.of(Order)):
        lists = [[x for x in p.of(Order) if x.place == line] for p in job.processes]
        rows, counts = [*zip(*lists, strict=False)], []
        sizes = {x.size for row in rows for x in row}
        for process, own in zip(job.processes, lists, strict=True):
            counts += [between(process, *pair) for pair in pairwise(own)]
        part = min(sizes, default=0) / len(lists)
        other = all(len({x.value for x in row}) > 1 for row in rows)
        fit = [n > 3 * b and -b < n - part <= len(lists) for n, b in counts]
        if counts and len(sizes) == 1 and other and all(fit):
            text = f"{line} draws a different order of {min(sizes):,} on each rank, "
            return f"{text}and a rank reads about {part:,.0f} of them"
    return ""


def between(process, one: Order, other: Order) -> tuple[int, int]:
    """Return how many samples networks get between two draws, and a batch's size.

    After the watched steps, this assumes batches of the same sizes. If other orders
    between the draws contain as many samples, return the number of these files, 1.
    """
    own = [x for x in process.of(Input) if one.step <= x.step < other.step]
    if any(x.arguments for x in own):
        return 0, 1  # perhaps each entry consists of two samples
    sizes = [len(x.rows) for x in own]
    parts = [x for x in process.of(Order) if one.time < x.time < other.time]
    samples, batch = sum(sizes), max(sizes, default=0)
    seen = own[-1].step + 1 - one.step if own else 0  # watched steps
    if own and (steps := other.step - one.step) > seen:
        return samples * (steps - 1) // seen + 1, batch  # the last one may be smaller
    if parts and abs(sum(x.size for x in parts) - samples) < batch:
        return len(parts), 1
    return samples, batch


def same_generators(job: Job) -> tuple[bool, str, str]:
    """Return whether the script's own generators draw the same numbers on two ranks.

    Also return a message if many do, in any order: this is no joint decision. With
    equal rollouts of a policy (a network runs several times before each step, and the
    step has equal inputs), also return the line that makes a generator.
    """
    made, lists, acts = Counter(), [], []
    for row in job.rows(Made):
        made[row[0].place] += len({one.state for one in row}) < len(row)
    often = max(3, len({one.step for one in job.of(Input)}) / 2)
    same = [place for place, count in made.items() if count > often]
    for process in job.processes:
        calls = Counter(x.after for x in process.of(Measured) if x.what == "seen")
        acts.append(sum(n > 1 for n in calls.values()))
        scans = [one.states for one in process.of(Own)[:2]]
        lists.append([x for x in scans[0] if x not in scans[-1]] if scans else [])
    acts.append(sum(len({tuple(one.rows) for one in x}) == 1 for x in job.rows(Input)))
    if same and min(acts) > often and not job.of(Order):
        text = f"networks run on equal numbers on all ranks, in {acts[-1]} steps"
        return True, text, same[0]
    for (n, one), (m, other) in combinations(enumerate(lists), 2):
        shifts = Counter(other.index(x) - k for k, x in enumerate(one) if x in other)
        same = same or bool(shifts)
        for shift, count in shifts.most_common(1):
            if count > 2 + (shift == 0) and len(one) == len(other):
                what = f"{count} of {len(one)} generators of rank {n} draw the same "
                return True, f"{what}numbers as generators of rank {m}", ""
    return bool(same), "", ""
