"""Law 4: replicas are equal."""

import math

from ..job import Job
from ..law import (
    NOTE,
    RISK,
    WRONG,
    Breach,
    NotJudged,
    check,
    need,
    several,
)
from .files import Saved
from .states import LAW, Layout, State


def alike(lists: list, tolerance: float = 1e-3) -> bool:
    """Return whether all lists of numbers are near the first one."""
    return all(len(x) == len(lists[0]) and close(lists[0], x, tolerance) for x in lists)


def close(one: list[float], other: list[float], tolerance: float) -> bool:
    """Return whether two lists are equal up to rounding, or not finite."""
    size = max(math.hypot(*one), math.hypot(*other))
    gap = math.hypot(*(a - b for a, b in zip(one, other, strict=True)))
    return not gap > tolerance * size  # also if there are NaNs


def listed(names: list[str], most: int = 3) -> str:
    """Return the first names of a list."""
    more = f" and {len(names) - most} more" * (len(names) > most)
    return ", ".join(names[:most]) + more


def states_of(job: Job, moment: str, what: str = "") -> list[list[State]]:
    """Return the states of one moment that all ranks wrote, by rank."""
    found = {}
    for process in job.processes:
        count = {}
        for one in process.of(State):
            if one.moment == moment and what in ("", one.what):
                key = one.step, one.what
                count[key] = count.get(key, 0) + 1
                found.setdefault((*key, count[key]), []).append(one)
    return [
        found[key] for key in sorted(found) if len(found[key]) == len(job.processes)
    ]


def differing(row: list[State], tolerance: float = 1e-6) -> tuple[list[str], int]:
    """Return the names of tensors that differ, and how many were compared."""
    ranks = [one.rows() for one in row]
    names = [name for name in ranks[0] if all(name in one for one in ranks)]
    found = [x for x in names if not alike([one[x] for one in ranks], tolerance)]
    return found, len(names)


def equal_steps(job: Job) -> list[tuple[int, bool]]:
    """Return for each watched step whether all ranks begin it with equal weights."""
    rows = states_of(job, "step", "weights")
    return [(row[0].step, not differing(row)[0]) for row in rows]


@check(LAW, WRONG, read="docs/pitfalls.md")
def names_differ(job):
    """The ranks have weights or buffers with other names, or in another order.

    Create layers and buffers in the same order in every process: sort what comes from a
    set() or from the file system. DDP matches tensors by their position.
    """
    several(job)
    rows = zip(*(process.of(Layout) for process in job.processes), strict=False)
    for row in need([*rows], "DDP is not used"):
        for kind in ("weights", "buffers"):
            lists = [getattr(one, kind) for one in row]
            for rank, own in enumerate(lists):
                if own == lists[0]:
                    continue
                pairs = zip([*lists[0], "nothing"], [*own, "nothing"], strict=False)
                number, (one, other) = next(
                    (n, pair) for n, pair in enumerate(pairs, 1) if pair[0] != pair[1]
                )
                same = sorted(own) == sorted(lists[0])
                what = f"rank {rank} has the network's {kind} in another order than "
                what = what if same else f"rank {rank} has other {kind} than "
                what += f"rank 0: number {number} is {other}, and on rank 0 {one}"
                yield Breach(what, row[rank].place)
                break


@check(LAW, WRONG, causes=[names_differ], read="tutorial/11_hangs/README.md")
def weights_differ(job):
    """The ranks start with different weights.

    Wrap the network in DDP, or broadcast its weights from rank 0 before the first step.
    """
    several(job)
    rows = states_of(job, "step", "weights")
    row = need(rows, "no step with unsharded weights was seen on all ranks")[0]
    found, count = differing(row)
    if found:
        what = f"before the first step, {len(found)} of {count} weights differ between "
        what += f"the ranks: {listed(found)}"
        mend = ""
        if job.of(Layout):
            mend = (
                "Create them before DDP wraps the network, inside it, and do not set "
            )
            mend += "them later on one rank only."
        yield Breach(what, row[0].place, mend=mend)


@check(
    LAW,
    RISK,
    general=True,
    causes=[names_differ, weights_differ],
    read="tutorial/11_hangs/README.md",
)
def weights_drift(job):
    """The ranks' weights drift apart.

    Look for code that changes weights or optimizer states on one rank only.
    Not a mistake if: only one rank's weights are used.
    """
    several(job)
    rows = states_of(job, "step", "weights")
    need(rows, "no step with unsharded weights was seen on all ranks")
    if not differing(rows[0])[1]:
        raise NotJudged("the ranks train networks with different names of weights")
    for row in rows:
        found, count = differing(row, 1e-5)
        if found:
            what = f"after step {row[0].step}, {len(found)} of {count} weights differ "
            again = [step for step, same in equal_steps(job) if same]
            level = RISK
            if again[-1:] and again[-1] > row[0].step:
                what += f"between the ranks, and in step {again[-1]} they are equal "
                what, level = f"{what}again, as in local SGD", NOTE
            else:
                what += f"between the ranks: {listed(found)}"
            yield Breach(what, row[0].place, level=level)
            if level == NOTE:
                raise NotJudged("the ranks average their weights only now and then")
            return
    parts = [f"{differing(rows[0])[1]} weights are equal on {len(rows[0])} ranks "]
    parts[0] += f"before {len(rows)} steps"
    kept = states_of(job, "optimizer")
    for row in kept:
        found, _ = differing(row, 1e-4)
        if found:
            what = (
                f"before step {row[0].step + 1}, {len(found)} optimizer states differ "
            )
            yield Breach(f"{what}between the ranks: {listed(found)}", row[0].place)
            return
    if kept and (count := max(differing(row)[1] for row in kept)):
        parts.append(f"{count} optimizer states")
    ends = states_of(job, "end", "weights")
    if ends and not differing(ends[0], 1e-5)[0]:
        parts.append("the weights at the end")
    yield ", ".join(parts)


@check(
    LAW,
    RISK,
    causes=[names_differ, weights_drift],
    read="tutorial/16_sharded/README.md",
)
def buffers_differ(job):
    """The ranks validate networks with different weights or buffers (batch norm's).

    Broadcast the buffers from rank 0 before validation, or use SyncBatchNorm. Update an
    EMA model on every rank.
    Not a mistake if: the difference does not matter to you.
    """
    several(job)
    rows = states_of(job, "validation")
    for row in need(rows, "the ranks validate no network after the same step"):
        found, count = differing(row, 1e-4)
        if found and len({one.what for one in row}) == 1:
            what = f"after step {row[0].step}, {len(found)} of {count} weights and "
            what += f"buffers of the validated {row[0].what} differ between the ranks: "
            what += listed(found)
            # DDP copies rank 0's statistics before the next step
            norms = all("running_" in name for name in found) and row[0].trains
            saved = [x for x in job.of(Saved) if x.weights and x.step >= row[0].step]
            if saved and norms:
                what += f"; {saved[0].place} saves those of rank {saved[0].rank} only"
            level = NOTE if norms and not saved else RISK
            yield Breach(what, row[0].place, level=level)
            return


@check(LAW, RISK, causes=[weights_drift], read="tutorial/16_sharded/README.md")
def own_buffers(job):
    """Each rank updates buffers (not batch norm's) from its own batches only.

    All-reduce the statistics from which you update them: before each forward pass, DDP
    replaces the other ranks' buffers with rank 0's.
    Not a mistake if: rank 0's statistics alone are good enough.
    """
    several(job)
    for row in need(states_of(job, "step", "buffers"), "no network has such buffers"):
        found, count = differing(row, 1e-4)
        if found:
            what = f"in step {row[0].step + 1}, {len(found)} of {count} buffers differ "
            yield Breach(f"{what}between the ranks: {listed(found)}", row[0].place)
            return


@check(LAW, NOTE, causes=[buffers_differ], read="tutorial/16_sharded/README.md")
def own_statistics(job):
    """Rank 0 alone validates, with batch-norm statistics of its own batches.

    Use SyncBatchNorm, or average the statistics, if the batches per rank are small.
    """
    several(job)
    rows = states_of(job, "step", "norms") + states_of(job, "end", "norms")
    need(rows, "no network has batch norm")
    validates = [bool([*filter(is_validation, p.of(State))]) for p in job.processes]
    if validates[0] and not any(validates[1:]):
        found, count = differing(rows[-1], 1e-4)
        if found:
            what = f"rank 0 alone validates, and {len(found)} of {count} batch-norm "
            yield Breach(
                f"{what}statistics differ between the ranks", rows[-1][0].place
            )


def is_validation(one: State) -> bool:
    """Return whether a state was written in a validation."""
    return one.moment == "validation"


@check(
    LAW,
    RISK,
    causes=[names_differ, weights_differ, weights_drift, buffers_differ, own_buffers],
    read="tutorial/11_hangs/README.md",
)
def weights_differ_in_the_end(job):
    """The ranks end with different weights.

    Look for code that changes the weights on one rank only.
    Not a mistake if: only one rank's weights are used.
    """
    several(job)
    for row in need(
        states_of_the_end(job), "not every rank's weights were there at the end"
    ):
        found, count = differing(row, 1e-5)
        if found:
            what = f"in the end, {len(found)} of {count} weights differ between the "
            yield Breach(f"{what}ranks: {listed(found)}", row[0].place)


def states_of_the_end(job: Job) -> list[list[State]]:
    """Return the last weights, if all ranks have taken the same number of steps."""
    own = [[x for x in p.of(State) if x.moment == "end"] for p in job.processes]
    own = [[x for x in found if x.what == "weights"][-1:] for found in own]
    row = [one for found in own for one in found]
    same = len({one.step for one in row}) == 1 and len(row) == len(job.processes)
    return [row] if same else []
