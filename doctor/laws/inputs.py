"""Law 3: random streams differ between ranks. Checks inputs, and epochs' seeds."""

from ..draws import same_draws
from ..generators import called, cause
from ..job import Job
from ..law import RISK, Breach, Doubt, check, need, several
from ..meshes import undivided
from ..neighbours import Input, inputs, same_rows
from .randomness import LAW, Draw, same_random_numbers, worded

STRATA = (
    "Draw it with a generator that each rank seeds differently, or compute it from a "
    "sample's place in the batch of all ranks, n * world_size + rank."
)


@check(LAW, RISK, needs=[Input], read="pitfall 9")
def same_inputs(job):
    """The ranks draw the same inputs, or the same time steps.

    Seed each rank with its own number, such as seed + rank, before it draws them.
    Not a mistake if: all ranks are meant to use the same values.
    """
    several(job)
    undivided(job)
    first = [process.of(Input) for process in job.processes]
    need(all(first), "no input was seen on all ranks")
    if not same_rows(first):
        yield from argument(job)
        return
    lines, _ = same_draws(job)
    if lines and not any(one.loaded for own in first for one in own):
        what, place, _ = worded(job, *next(iter(lines.items())))
        yield Breach(f"{what}, and the network's inputs are equal", place)


def argument(job: Job):
    """Yield a breach if one input is equal on all ranks, but another input differs."""
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

    Seed the generators once, before the first epoch, or with a number that depends on
    the epoch.
    Not a mistake if: each epoch is meant to draw the same numbers.
    """
    several(job)
    process, first, again = job.processes[0], {}, []
    draws = [x for x in process.events + process.loaders if isinstance(x, Draw)]
    for one in sorted(draws, key=lambda one: one.time):
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
            mend = "The loader processes copy the data set's generator in each epoch: "
            mend += "make it in worker_init_fn, of torch.initial_seed()."
        yield Breach(what, cause(job, name, [one])[0], mend=mend)
