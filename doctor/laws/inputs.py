"""Law 3: the ranks' random streams differ. Checks inputs and seeds."""

from collections import Counter
from collections.abc import Iterator
from itertools import combinations

from ..draws import MADE, Drawn, Made, same_draws, since
from ..generators import Seed, called, cause
from ..job import Job, Process
from ..law import RISK, Breach, Doubt, check, need
from ..neighbours import Input, inputs, other_targets, same_rows
from .randomness import LAW, Draw, same_random_numbers, worded
from .samples import left_out, undivided

STRATA = "Seed this input's generator by rank, or use index n * world_size + rank."


@check(LAW, RISK, needs=[Input], read="pitfall 9")
def same_inputs(job):
    """The ranks draw the same inputs, masks, negatives or time steps.

    Seed each rank differently, for example with seed + 1000 * epoch + rank.
    Not a mistake if: all ranks are meant to use the same values.
    """
    undivided(job)
    first = [process.of(Input) for process in job.processes]
    need(all(first), "no input was seen on all ranks")
    if not same_rows(first) or other_targets(job):
        yield from argument(job)
    elif not any(one.loaded for own in first for one in own):
        lines, _ = same_draws(job)
        for line, one in [*lines.items()][:1]:
            breach = worded(job, line, one)
            breach.what += ", and the network's inputs are equal"
            yield breach


def argument(job: Job) -> Iterator[Breach]:
    """Yield a breach if one input is equal on all ranks, although another differs."""
    lists = [{one.step: one for one in own} for own in inputs(job)]
    steps = [step for step in lists[0] if all(step in own for own in lists)]
    rows = [[own[step] for own in lists] for step in steps]
    for number in sorted({x for row in rows for x in row[0].arguments}):
        every = [[one.arguments.get(number) for one in row] for row in rows]
        start = since([bool(x[0]) and x.count(x[0]) == len(x) for x in every], 8) or 0
        every = every[start:]
        same = [x[0] for x in every if x[0] and x.count(x[0]) == len(x)]
        if len(same) > max(7, 0.9 * len(every)) and len({*same}) > 0.9 * len(same):
            what = f"only input {number} is equal on all ranks, in {len(same)} passes"
            what += f", from step {steps[start] + 1} on" * (start > 0)
            if not all(distinct for _, distinct, *_ in same):
                raise Doubt(what)
            yield Breach(what, rows[start][0].place, mend=STRATA)
            return


@check(LAW, RISK, causes=[same_random_numbers], read="pitfall 9")
def seeds_restart(job):
    """Each epoch draws the same random numbers as an earlier one.

    At the start of each epoch, call torch.manual_seed(seed + 1000 * epoch + rank). Seed
    a dataset's own generator in worker_init_fn with torch.initial_seed().
    Not a mistake if: each epoch is meant to draw the same numbers.
    """
    process, first, again = job.processes[0], {}, []
    for one in sorted(process.of(Draw, loaders=True), key=lambda one: one.time):
        if one.loader == process.training and one.epoch in process.epochs:
            for name, state in one.states.items():
                earlier = first.setdefault((one.where, one.worker, name, state), one)
                again += [(name, one)] * (earlier.epoch != one.epoch)
    if len(again) > 2:
        name, one = again[0]
        what = f"{called(name)} has an earlier epoch's states in {len(again)} draws"
        yield Breach(what, cause(job, name, [one])[0])


@check(LAW, RISK, effects=[left_out], read="pitfall 9")
def shifted_numbers(job):
    """One rank draws the same numbers as another rank at a different time.

    Seed once, with seed + rank, or with step * world_size + rank in each step: step +
    rank is the same on rank 1 and, a step later, on rank 0.
    Not a mistake if: all ranks are meant to draw the same numbers.
    """
    undivided(job)
    ranks = [streams(process) for process in job.processes]
    for key in ranks[0]:
        own = [(n, one[key]) for n, one in enumerate(ranks) if key in one]
        for (n, first), (m, other) in combinations(own, 2):
            pairs = [(first[x], other[x]) for x in first.keys() & other.keys()]
            for distance, count in Counter(b - a for a, b in pairs).most_common(1):
                if distance and count >= max(3, len(other) / 5, 0.8 * len(pairs)):
                    what = f"{key[0]} draws the same numbers {count} times on ranks "
                    what += f"{n} and {m}, {abs(distance)} steps apart"
                    yield Breach(what, key[1])
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
