"""Law 3: random streams differ between ranks. Inputs that ranks compute alike."""

from itertools import pairwise

from ..draws import Drawn, Made, same_draws
from ..job import Job
from ..law import RISK, Breach, Doubt, NotJudged, check, need, several
from ..meshes import undivided
from ..neighbours import Input, inputs, same_rows
from .randomness import LAW, Seed

STRATA = (
    "Draw it with a generator that each rank seeds differently, or compute it from a "
    "sample's place in the batch of all ranks, n * world_size + rank."
)


@check(LAW, RISK, needs=[Input])
def same_arguments(job):
    """An argument of the network, such as time steps, is equal on all ranks.

    Draw it with a generator that each rank seeds differently.
    Not a mistake if: all ranks are meant to use the same values.
    """
    several(job)
    undivided(job)
    lists = [{one.step: one for one in own} for own in inputs(job)]
    steps = [step for step in lists[0] if all(step in own for own in lists)]
    rows = [[own[step] for own in lists] for step in steps]
    for number in sorted({x for row in rows for x in row[0].arguments}):
        every = [[one.arguments.get(number) for one in row] for row in rows]
        same = [x[0] for x in every if x[0] and x.count(x[0]) == len(x)]
        often = len(same) > max(7, 0.9 * len(rows)) and len({*same}) > 0.9 * len(same)
        if often and same_rows([[*own.values()] for own in lists]):
            raise NotJudged("all inputs are equal on several ranks: see law 1")
        if often:
            what = (
                f"input {number} of the network is equal on all ranks in {len(same)} "
            )
            what += f"of {len(rows)} passes, and another input differs"
            if not all(distinct for _, distinct in same):
                raise Doubt(what)
            yield Breach(what, rows[0][0].place, mend=STRATA)
            return


@check(LAW, RISK, needs=[Drawn])
def same_drawn_inputs(job):
    """The ranks draw the same inputs.

    Seed each rank with its own number, such as seed + rank, before it draws them.
    Not a mistake if: all ranks are meant to train on the same inputs.
    """
    several(job)
    undivided(job)
    first = [[*p.of(Input)] for p in job.processes]
    lines, _ = same_draws(job)
    need(lines and all(first), "no draws are equal on several ranks")
    if not any(one.loaded for own in first for one in own) and same_rows(first):
        place, (what, _) = next(iter(lines.items()))
        seeds = [x for x in job.processes[0].of(Seed) if x.generator == "torch"]
        if len(seeds) > 2 and all(a.place == b.place for a, b in pairwise(seeds[-3:])):
            place = seeds[-1].place
            what += f", since {seeds[-1].call} on each rank"
        yield Breach(f"{what}, and the network's inputs are equal", place)


@check(LAW, RISK, needs=[Made])
def same_new_generators(job: Job):
    """The ranks make generators with the same seed in each step.

    Add the rank to the seed: default_rng([seed, step, rank]).
    Not a mistake if: all ranks are meant to decide the same.
    """
    several(job)
    rows, counts = job.rows(Made), {}
    for row in rows:
        if len({one.state for one in row}) < len(row):
            counts.setdefault(row[0].place, set()).add(row[0].state)
    steps = len({one.step for one in job.of(Input)})
    for place, states in counts.items():
        if len(states) > max(3, 0.5 * steps):
            what = (
                f"the generators that {place} makes in {len(states)} steps have equal"
            )
            raise Doubt(f"{what} seeds on several ranks, perhaps to decide together")
    yield from ()
