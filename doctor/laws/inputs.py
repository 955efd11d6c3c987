"""Law 3: the ranks' random streams differ. Checks inputs and seeds."""

from collections import Counter
from itertools import combinations, groupby, pairwise
from statistics import fmean, pstdev

from ..draws import MADE, Drawn, Made, same_draws, same_generators
from ..generators import Seed, called, cause
from ..job import Job, Process
from ..law import RISK, Breach, Doubt, check, need, several
from ..neighbours import Input, inputs, other_targets, same_rows
from .randomness import LAW, Draw, same_random_numbers, worded
from .samples import left_out, undivided

STRATA = (
    "Draw this input with a generator that each rank seeds differently, or compute it "
    "from a sample's number or its index in the global batch: n * world_size + rank."
)


@check(LAW, RISK, needs=[Input], read="pitfall 9")
def same_inputs(job):
    """The ranks draw the same inputs, masks, negatives or time steps.

    Seed each rank differently, for example with seed + 1000 * epoch + rank.
    Not a mistake if: all ranks are meant to use the same values.
    """
    several(job)
    undivided(job)
    first = [process.of(Input) for process in job.processes]
    need(all(first), "no input was seen on all ranks")
    if not same_rows(first) or other_targets(job):
        found = [*argument(job)]
        yield from found or places(job)
        return
    lines, _ = same_draws(job)
    if lines and not any(one.loaded for own in first for one in own):
        what, place, _ = worded(job, *next(iter(lines.items())))
        yield Breach(f"{what}, and the network's inputs are equal", place)


def argument(job: Job):
    """Yield a breach if one input is equal on all ranks, although another differs."""
    lists = [{one.step: one for one in own} for own in inputs(job)]
    steps = [step for step in lists[0] if all(step in own for own in lists)]
    rows = [[own[step] for own in lists] for step in steps]
    for number in sorted({x for row in rows for x in row[0].arguments}):
        every = [[one.arguments.get(number) for one in row] for row in rows]
        same = [x[0] for x in every if x[0] and x.count(x[0]) == len(x)]
        if len(same) > max(7, 0.9 * len(rows)) and len({*same}) > 0.9 * len(same):
            what = f"input {number} of the network is equal on all ranks in "
            what += f"{len(same)} of {len(rows)} passes, and another input differs"
            if not all(distinct for _, distinct in same):
                raise Doubt(what)
            yield Breach(what, rows[0][0].place, mend=STRATA)
            return


def places(job: Job):
    """Yield a breach if two ranks change different samples at the same positions."""
    calls = {}
    for _, row in groupby(job.rows(Input), lambda row: row[0].step):
        for number, one in enumerate(row):
            if len({x.network for x in one}) == 1:
                calls.setdefault((one[0].network, number), []).append(one)
    for rows in calls.values():
        for n, m in combinations(range(min(4, len(rows[0]))), 2):
            steps = [gains(x[n], x[m], y[m]) for x, y in pairwise(rows)]
            steps = [step for step in steps if step]
            every = [gain for step in steps for gain in step]
            if len(every) < 100 or len(steps) < 8:
                continue
            mean, error = fmean(every), pstdev(every) / len(every) ** 0.5
            often = sum(fmean(step) > 0 for step in steps)
            if mean > max(0.05, 10 * error) and often > 0.9 * len(steps):
                what = f"in {often} of {len(steps)} steps, different samples of ranks "
                what += f"{n} and {m} have equal numbers at the same places (by "
                what += f"{mean:.0%} more than other samples)"
                if (place := same_generators(job)) is None:
                    raise Doubt(what)
                what += ", and the script's own generators draw the same numbers"
                yield Breach(what, place or rows[0][0].place, mend=STRATA)
                return


def gains(one: Input, other: Input, later: Input) -> list[float]:
    """Return how much more alike two ranks' samples are at the same index of a batch.

    The comparison is with the other rank's samples at another index or a batch later.
    """
    found, size = [], min(len(x.few) for x in (one, other, later))
    for n in range(size):
        pairs = other.few[n], other.few[(n + size // 2) % size], later.few[n]
        same = [alike(one.few[n], few) for few in pairs]
        if None not in same and one.rows[n] != other.rows[n]:
            found.append(same[0] - (same[1] + same[2]) / 2)
    return found


def alike(one: list[float], other: list[float]) -> float | None:
    """Return the share of positions with equal numbers, except padding at the ends."""
    starts, ends = zip(middle(one), middle(other), strict=True)
    found = [one[n] == other[n] for n in range(max(starts), min(ends))]
    return fmean(found) if found else None


def middle(row: list[float]) -> tuple[int, int]:
    """Return the start and end of a row without its padding (runs of equal numbers)."""
    first = next((n for n, x in enumerate(row) if x != row[0]), len(row))
    last = next((n for n, x in enumerate(row[::-1]) if x != row[-1]), len(row))
    return first * (first > 1), len(row) - last * (last > 1)


@check(LAW, RISK, causes=[same_random_numbers], read="pitfall 9")
def seeds_restart(job):
    """Each epoch draws the same random numbers as an earlier one.

    At the start of each epoch, call torch.manual_seed(seed + 1000 * epoch + rank).
    Not a mistake if: each epoch is meant to draw the same numbers.
    """
    several(job)
    process, first, again = job.processes[0], {}, []
    for one in sorted(process.of(Draw, loaders=True), key=lambda one: one.time):
        if one.loader == process.training and one.epoch in process.epochs:
            for name, state in one.states.items():
                earlier = first.setdefault((one.where, one.worker, name, state), one)
                again += [(name, one)] * (earlier.epoch != one.epoch)
    if len(again) > 2:
        name, one = again[0]
        what = f"{called(name)} has the same states in epoch "
        what += f"{process.epochs.index(one.epoch)} as in an earlier one, in "
        what += f"{len(again)} draws"
        mend = ""
        if name.startswith("its ") and one.worker is not None:
            mend = "The loader processes copy the dataset's generator in each epoch: "
            mend += "seed it in worker_init_fn with torch.initial_seed()."
        yield Breach(what, cause(job, name, [one])[0], mend=mend)


@check(LAW, RISK, effects=[left_out], read="pitfall 9")
def shifted_numbers(job):
    """One rank draws the same numbers as another rank at a different time.

    Make each seed from a number that no other rank uses at any time, such as
    step * world_size + rank: step + rank is the same on rank 1 and, a step later, on
    rank 0. Or seed only once, with seed + rank.
    Not a mistake if: all ranks are meant to draw the same numbers.
    """
    several(job)
    undivided(job)
    ranks = [streams(process) for process in job.processes]
    for name in ranks[0]:
        own = [(n, one[name]) for n, one in enumerate(ranks) if name in one]
        for (n, first), (m, other) in combinations(own, 2):
            if steps := shifted(first, other):
                (told, place), (one, two) = name, steps[0]
                what = f"{told} draws the same numbers on rank {n} in step {one + 1} "
                what += f"and on rank {m} in step {two + 1}, and so on: "
                yield Breach(f"{what}{len(steps)} times", place)
                return


def streams(process: Process) -> dict[tuple[str, str], dict[tuple, int]]:
    """Return {(call, line): {drawn numbers or seed: the first step with them}}."""
    found, counts = {}, Counter()
    for one in reversed(process.events):  # the first step is kept
        name = value = None
        if isinstance(one, Drawn) and one.name not in MADE:
            name, value = f"torch.{one.name}()", one.value
        elif isinstance(one, Made):
            name, value = "numpy.random.default_rng()", one.state
        elif isinstance(one, Seed):
            name, value = called(one.generator), one.call
        if name:
            counts[name, one.place, one.step] += 1  # the number of the draw in its step
            key = value, counts[name, one.place, one.step]
            found.setdefault((name, one.place), {})[key] = one.step
    return found


def shifted(one: dict, other: dict) -> list[tuple[int, int]]:
    """Return pairs of steps, equally far apart, in which two ranks' draws are equal."""
    pairs = sorted((one[key], other[key]) for key in one.keys() & other.keys())
    for distance, count in Counter(b - a for a, b in pairs).most_common(1):
        if distance and count >= max(3, len(other) / 5, 0.8 * len(pairs)):
            return [pair for pair in pairs if pair[1] - pair[0] == distance]
    return []
