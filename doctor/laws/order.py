"""Law 1: every sample is read once per epoch. Compares the epochs' orders."""

from itertools import combinations, pairwise

from ..draws import Order
from ..job import Job
from ..law import RISK, WRONG, Breach, Doubt, check, need, several
from ..moments import Step
from ..neighbours import Input, before_a_repeat, contents, tells
from ..reads import Feed, feeds, loaded
from .randomness import Draw
from .samples import LAW, left_out, where

SHARE = "Omit persistent_workers, or keep what changes in a tensor in shared memory."


@check(LAW, WRONG, needs=[Step], causes=[left_out], read="lesson 4")
def same_order(job):
    """Two epochs read the samples in the same order.

    Call sampler.set_epoch(epoch) at the start of each epoch.
    Not a mistake if: the order of the batches is fixed on purpose.
    """
    several(job)
    kept, first = outdated(job), feeds(job)
    loop = all(process.training is None for process in job.processes)
    epochs = laps(job) if loop else [one.ranks[0] for one in loaded(job)]
    need(len(epochs) > 1, "fewer than two epochs of training were seen: see --short")
    pairs = combinations(enumerate(epochs), 2)
    for (number, one), (later, other) in sorted(pairs, key=lambda x: x[1][0] - x[0][0]):
        if [*map(list, one)] != [*map(list, other)] or len(one) < 2 + loop:
            continue
        what = f"epochs {number} and {later} have the same {len(one)} batches in order"
        flat = [x for batch in one for x in batch]
        if later > number + 1:
            raise Doubt(what)  # perhaps training begins again
        known = same_permutation(job) if loop else max(flat) < 2**40  # no hashes
        known = known and (loop or not job.processes[0].loader().stream)
        mend = "Shuffle the training samples, in a different order in each epoch."
        if kept:
            yield Breach(f"{what}; {kept}", where(job), mend=SHARE)
        elif (first and first[0].shuffles) or (known and flat != sorted(flat)):
            mend = "" if first and first[0].divides else mend
            yield Breach(what, where(job), level=RISK * loop, mend=mend)
        return
    for number, (one, other) in enumerate(pairwise(marks(job) if kept else ())):
        if one == other and tells(one):
            what = f"epochs {number} and {number + 1} have the same {len(one)} labels"
            yield Breach(f"{what}; {kept}", where(job), mend=SHARE)
            return


@check(LAW, RISK, needs=[Step, Input, Feed], read="lesson 4")
def state_skips(job):
    """A network's state goes from one window of a series to one that is not the next.

    Give each rank a series of its own (such as tokens[rank::world_size] of a batch's
    rows), or its own contiguous part, and read its windows in order.
    Not a mistake if: the state does not depend on the windows' order.
    """
    several(job)
    own, size = job.processes[0], len(job.processes)
    carries = [one.carries for one in own.of(Input)]
    reads = [one.index for one in own.trained]
    steps = [b - a for a, b in pairwise(reads) if None not in (a, b)]
    first = feeds(job)
    divides = first and all(one.divides for one in first)
    if divides and 2 * sum(carries) > len(carries) and steps:
        count = steps.count(size)
        if count > 0.8 * len(steps):
            what = f"the network gets its last state in {sum(carries)} passes, but "
            what += f"{count} of {len(steps)} windows come {size} after the last one"
            yield Breach(what, where(job))


def laps(job: Job) -> list[list[list[int]]]:
    """For a loop without a DataLoader, return rank 0's batches in two epochs, or []."""
    own = contents(job)[0]
    count = len(before_a_repeat(own))
    return [own[:count], own[count : 2 * count]] if len(own) >= 2 * count else []


def same_permutation(job: Job) -> bool:
    """Return whether rank 0 draws the same order of samples in different steps."""
    found = {}
    for one in job.processes[0].of(Order):
        found.setdefault(one.place, {})[one.step] = one.value
    return any(len(own) > 1 and len({*own.values()}) == 1 for own in found.values())


def marks(job: Job) -> list[list[int]]:
    """Return hashes of integers in rank 0's samples, for a stream's whole epochs."""
    own = job.processes[0]
    epochs = [own.batches(epoch) for epoch in own.epochs if own.whole(epoch)]
    epochs = [epoch for epoch in epochs if all(one.marks for one in epoch)]
    return [[x for one in epoch for x in one.marks] for epoch in epochs]


def outdated(job: Job) -> str:
    """Return a message if the loader's processes hold an outdated value, else ""."""
    process = job.processes[0]
    own = [x for x in process.of(Feed) if x.loader == process.training]
    now = {x.epoch: x.fields for x in own}
    draws = process.of(Draw, loaders=True)
    for one in (x for x in draws if x.loader == process.training):
        for name, old in one.fields.items():
            new = now.get(one.epoch, {}).get(name, old)
            if new != old == now.get(0, {}).get(name):
                text = f"in epoch {one.epoch}, {name} is {new} in the main process, "
                return f"{text}but {old} in the loader's processes"
    return ""
