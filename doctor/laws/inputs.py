"""Law 3: the ranks' random streams differ. Checks inputs and seeds."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from ..draws import MADE, Drawn, Made, same_draws
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
        yield from argument(job)
    elif not any(one.loaded for own in first for one in own):
        lines, _ = same_draws(job)
        for line, one in [*lines.items()][:1]:
            found = worded(job, line, one)
            yield replace(
                found, what=f"{found.what}, and the network's inputs are equal"
            )


def argument(job: Job) -> Iterator[Breach]:
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


@check(LAW, RISK, causes=[same_random_numbers], read="pitfall 9")
def seeds_restart(job):
    """Each epoch draws the same random numbers as an earlier one.

    At the start of each epoch, call torch.manual_seed(seed + 1000 * epoch + rank). Seed
    a dataset's own generator in worker_init_fn with torch.initial_seed(), because each
    epoch's loader processes copy the generator.
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
        yield Breach(f"{what}{len(again)} draws", cause(job, name, [one])[0])


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
    for told, place in ranks[0]:
        own = [
            (n, one[told, place]) for n, one in enumerate(ranks) if (told, place) in one
        ]
        for (n, first), (m, other) in combinations(own, 2):
            pairs = sorted((first[x], other[x]) for x in first.keys() & other.keys())
            apart = Counter(b - a for a, b in pairs).most_common(1)
            for distance, count in apart:
                if distance and count >= max(3, len(other) / 5, 0.8 * len(pairs)):
                    one, two = next(x for x in pairs if x[1] - x[0] == distance)
                    what = (
                        f"{told} draws the same numbers on rank {n} in step {one + 1} "
                    )
                    what += f"and on rank {m} in step {two + 1}, and so on: "
                    yield Breach(f"{what}{count} times", place)
                    return


def streams(process: Process) -> dict[tuple[str, str], dict[tuple, int]]:
    """Return {(call, line): {drawn numbers or seed: the first step with them}}."""
    found, counts = {}, Counter()
    for one in reversed(process.events):  # the first step is kept
        if isinstance(one, Drawn) and one.name not in MADE:
            name, value = f"torch.{one.name}()", one.value
        elif isinstance(one, Made):
            name, value = "numpy.random.default_rng()", one.state
        elif isinstance(one, Seed):
            name, value = called(one.generator), one.call
        else:
            continue
        counts[name, one.place, one.step] += 1  # the number of the draw in its step
        key = value, counts[name, one.place, one.step]
        found.setdefault((name, one.place), {})[key] = one.step
    return found
