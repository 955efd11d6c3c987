"""Law 4: replicas are equal. Compares weights, buffers and optimizer states."""

import math
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from itertools import chain, pairwise, permutations
from operator import ne
from statistics import median

from ..job import Job
from ..law import NOTE, RISK, WRONG, Breach, Doubt, NotJudged, check, need
from ..moments import Step, Wraps
from ..neighbours import Input
from ..objects import COPY, LAYER
from .checkpoints import Saved
from .meeting import Call, collectives_differ, one_network, same_steps, steps_differ
from .resume import Loaded
from .states import INNER, LAW, State, copies, dealt, late_network

AGAIN = "Wrap the network in DDP again after you unfreeze weights."
NONE = "no step with unsharded weights was seen on all ranks"


def alike(lists: list, tolerance: float = 1e-3) -> bool:
    """Return whether all lists equal the first up to rounding; NaN is equal to all."""
    first = lists[0] if lists else []
    size = math.hypot(*first)
    return all(
        len(x) == len(first)
        and not math.dist(x, first) > tolerance * max(size, math.hypot(*x))
        for x in lists
    )


def listed(names: Iterable[str], most: int = 3) -> str:
    """Return the first few distinct names as text."""
    names = [*dict.fromkeys(names)]
    more = f" and {len(names) - most} more" * (len(names) > most)
    return ", ".join(names[:most]) + more


def states_of(job: Job, moment: str, what: str = "") -> list[list[State]]:
    """Return rows of states that all ranks wrote at one moment, one state per rank."""
    one_network(job)
    need(len(copies(job)) < 5, INNER)
    if moment not in ("first", "start"):
        same_steps(job)
    found, count = {}, len(job.processes)
    for number, process in enumerate(job.processes):
        for one in process.of(State):
            if one.moment == moment and what in ("", one.what):
                # Networks of one class may differ, such as a teacher and a student
                kind = one.kind if moment in ("validation", "other") else 0
                key = one.step, one.what, one.meets, kind
                found.setdefault(key, [[] for _ in range(count)])[number].append(one)
    lists = [found[key] for key in sorted(found)]
    lists = [own for own in lists if len({*map(len, own)}) == 1]
    return [[*row] for own in lists for row in zip(*own, strict=True)]


def differing(row: list[State], tolerance: float = 1e-6) -> tuple[list[str], int]:
    """Return the names of tensors that differ, and the number of compared tensors."""
    ranks = [one.rows() for one in row]
    names = [name for name in ranks[0] if all(name in one for one in ranks)]
    found = [x for x in names if not alike([one[x] for one in ranks], tolerance)]
    return found, len(names)


def first(
    rows: list[list[State]], what: str, tolerance: float, parts: Iterable[str] = ()
) -> tuple | None:
    """Return the first row that differs between ranks, a message and names, or None.

    `parts` are weights that may differ: see parts_of_layers().
    """
    for row in rows:
        found, count = differing(row, tolerance)
        found = [x for x in found if not {x, x.partition(" of ")[2]} & {*parts}]
        if found:
            text = f"{len(found)} of {count} {what} differ between the ranks"
            return row, f"{text}: {listed(found)}", found
    return None


def equal_steps(job: Job, after: int) -> list[int]:
    """Return later watched steps that begin with equal weights, not just loaded."""
    rows = [x for x in states_of(job, "step", "weights") if x[0].step > after]
    loads = {one.step for one in job.of(Loaded)}
    rows = [row for row in rows if row[0].step not in loads]
    return [row[0].step for row in rows if not differing(row)[0]]


def frozen(job: Job, names: list[str], step: int) -> str:
    """Return a text if these weights were frozen when DDP was made, before a step."""
    for one in [x for x in job.processes[0].of(Wraps) if x.step <= step][-1:]:
        if {*names} <= {*one.frozen}:
            return f"; they were frozen when DDP was made in {one.place}"
    return ""


def large(call: Call) -> bool:
    """Return whether a call sums at least 100 numbers."""
    return "reduce" in call.name and call.sent.find(" x ") > 2


def consensus(job: Job) -> None:
    """Raise NotJudged if the ranks' weights come nearer, without DDP, as in ADMM."""
    rows = [[x.values for x in row] for row in states_of(job, "step", "weights")]
    gaps = [math.dist(x[0], x[-1]) for x in rows if len({*map(len, x)}) == 1] or [0.0]
    steps = {x.step for x in job.of(Call) if large(x) and not x.weight}
    often = 2 * len(steps) > len(gaps) > 9
    nearer = often and 3 * max(gaps[-(len(gaps) // 4) :]) < max(gaps)
    text = "the ranks' weights come nearer, perhaps to a consensus"
    need(job.of(Wraps) or not nearer, text)


@cache
def parts_of_layers(job: Job) -> set[str]:
    """Return weights that may be each rank's part of a layer, as of a sharded head.

    They differ at the start, others do not, and their module calls a collective, or
    the script gathers only these, or each rank saves these, but not all weights, in a
    file of its own.
    """
    for row in states_of(job, "step", "weights")[:1]:
        found, count = differing(row)
        inside = [{*one.inside} for one in job.of(Call)]
        inside = [own for own in inside if 2 * len(own & {*found}) >= len(own)]
        files = [{x.path: {*x.names} for x in own.of(Saved)} for own in job.processes]
        paths = Counter(path for own in files for path in own)
        apart = [[x for path, x in own.items() if paths[path] == 1] for own in files]
        apart = [[x for x in own if {*found} <= x and len(x) < count] for own in apart]
        if found and all(apart):  # each rank has such a file
            return set().union(*chain(*apart))
        gathered = {name for one in job.of(Call) for name in one.gathers}
        within = {*found} <= set().union(*inside) or gathered == {*found}
        if len(found) < count and within:
            return {*found}
    return set()


def whole_weights(job: Job, names: list[str]) -> None:
    """Raise NotJudged if these may be parts of a changing network's weights."""
    parts = all(re.match(r"weight \d+ of shape ", one) for one in names)
    for what, rows in others(job).items() if parts else ():
        values = [row[0].rows() for row in rows]
        if sum(a != b for a, b in pairwise(values)) > len(rows) / 2:
            raise NotJudged(f"the optimizer's weights may be parts of those of {what}")


@check(LAW, WRONG, read="lesson 5")
def weights_differ(job):
    """The ranks start with different weights.

    Wrap the network in DDP when all its weights exist, in the same order on all ranks,
    or broadcast them from rank 0.
    Not a mistake if: each rank is meant to train networks of its own.
    """
    rows = need(states_of(job, "step", "weights"), NONE)
    found = first(rows[:1], "weights", 1e-6, parts_of_layers(job))
    start = states_of(job, "start", "weights")[:1]  # before the first backward pass
    if found and (not start or differing(start[0])[0]):
        whole_weights(job, found[2])
        what, place = f"before the first step, {found[1]}", rows[0][0].place
        shared = {x.step for x in job.of(Call) if large(x) and not x.weight}
        apart = 3 * len(shared) > len(rows) and not job.of(Wraps)  # or own networks
        yield Breach(what, place, level=RISK * apart)


EARLIER = weights_differ, collectives_differ, steps_differ


@check(LAW, RISK, general=True, causes=EARLIER, read="pitfall 11")
def weights_drift(job):
    """The ranks' weights drift apart.

    Look for code that changes weights or optimizer states on one rank only, or by each
    rank's own data.
    Not a mistake if: only one rank's weights are used.
    """
    rows, again = need(states_of(job, "step", "weights"), NONE), []
    parts = parts_of_layers(job)
    lost = any(math.isnan(x) for one in rows[-1] for x in one.values)
    need(not lost, "weights become NaN")
    count = differing(rows[0])[1] - len(parts)
    need(count, "the ranks train networks whose weights have different names")
    ends, kept = states_of(job, "end", "weights"), states_of(job, "optimizer")
    ends = [x for x in ends if differing(x)[1] > count / 2]  # or else, most are freed
    pairs = (rows, "weights"), (ends, "weights"), (kept, "optimizer states")
    for own, what in pairs:
        now_and_then = again and own is kept
        need(not now_and_then, "the ranks average their weights only now and then")
        if found := first(own, what, 1e-5 if what == "weights" else 1e-4, parts):
            row, text, names = found
            whole_weights(job, names)
            consensus(job)
            again = equal_steps(job, row[0].step) if own is rows else []
            when, mend = f"after step {row[0].step}", ""
            if own is ends:
                when, told = "at the end", frozen(job, names, row[0].step)
                text, mend = text + told, AGAIN * bool(told)
            elif row is rows[0]:
                when = "after the first backward pass, before an optimizer's step"
                mend = "Change the same weights by equal numbers on all ranks."
            if again:
                text += f"; in step {again[-1]} they are equal again, as in local SGD"
            level = NOTE if again else RISK
            yield Breach(f"{when}, {text}", row[0].place, level=level, mend=mend)
            if not again:
                return
    text = f"{count} weights are equal on {len(rows[0])} ranks before {len(rows)} steps"
    also = ["the weights at the end"] * bool(ends)
    also += ["the optimizer states"] * any(differing(row)[1] for row in kept)
    also += [f"the weights of {what}" for what in others(job)]
    yield text + "; so are " * bool(also) + " and ".join(also)
    late_network(job)
    if parts:
        text = "may be each rank's part of a layer"
        raise Doubt(f"{listed(sorted(parts))} {text}")


@check(LAW, RISK, causes=[weights_differ, weights_drift])
def other_network_differs(job):
    """A network that no optimizer trains, such as a teacher, differs between the ranks.

    Update this network after the same steps on all ranks: count steps, not samples.
    Not a mistake if: each rank is meant to use a network of its own.
    """
    for what, rows in others(job).items():
        if found := first(rows, f"weights of {what}", 1e-5):
            known = [x[0].names for x in states_of(job, "step", "weights")[:1]]
            whole_weights(job, *known or [[]])  # the network may be made from them
            row, text, _ = found
            text = f"before step {row[0].step + 1}, {text}; no optimizer trains {what}"
            mend = "Copy the network after DDP has wrapped it, or seed all ranks alike."
            if row is not rows[0]:
                last = rows[rows.index(row) - 1][0].step + 1
                text, mend = f"{text}, and it was equal before step {last}", ""
            yield Breach(text, row[0].place, mend=mend)


def others(job: Job) -> dict[str, list[list[State]]]:
    """Return states of networks that run in most steps but that no optimizer trains."""
    found = {}
    for row in states_of(job, "other"):
        found.setdefault(row[0].what, []).append(row)
    least = max(3, job.watched / 2)
    return {what: rows for what, rows in found.items() if len(rows) >= least}


APART = *EARLIER, weights_drift, other_network_differs


@check(LAW, RISK, causes=APART, read="pitfall 16")
def buffers_differ(job):
    """The ranks have different buffers, or validate different networks.

    Broadcast the buffers from rank 0 before validation, or use SyncBatchNorm. Update an
    EMA model on every rank.
    Not a mistake if: the difference does not matter to you.
    """
    rows, updated = states_of(job, "validation"), states_of(job, "step", "buffers")
    need(rows + updated, "no network was validated on all ranks after the same step")
    mend = "All-reduce the statistics in your buffers: DDP copies rank 0's buffers."
    for row in rows:
        what = f"weights and buffers of the validated {row[0].what}"
        if found := first([row], what, 1e-4, parts_of_layers(job)):
            # DDP copies rank 0's statistics before the next step
            norms = all("running_" in name for name in found[2]) and row[0].trains
            saved = any(x.step >= row[0].step for x in job.of(Saved))
            level = NOTE if norms and not saved else RISK
            text = f"after step {row[0].step}, {found[1]}"
            own = mend * (row[0].trains and not norms)
            yield Breach(text, row[0].place, level=level, mend=own)
            return
    if found := first(updated, "buffers", 1e-4):
        row, text, _ = found
        level = NOTE if rows else RISK  # the validated buffers are equal
        text = f"in step {row[0].step + 1}, {text}"
        yield Breach(text, row[0].place, mend=mend, level=level)


@check(LAW, RISK, causes=APART, read="pitfall 11")
def tensors_drift(job):
    """The ranks have different copies of a tensor that is no weight or buffer.

    Update this tensor with equal numbers on every rank: all_reduce(), broadcast() or
    gather them, including those that are drawn at random or that replace unused ones.
    Not a mistake if: the ranks are meant to have their own values of this tensor.
    """
    states, found, unsure, layers = states_of(job, "first", "kept"), [], [], []
    states += states_of(job, "step", "kept")
    states = [(own[0].step + 1, [x.rows() for x in own]) for own in states]
    for name in {x for _, row in states for x in row[0]}:
        own = [(n, row) for n, row in states if all(name in x for x in row)]
        values = [[x[name] for x in row] for _, row in own]
        same = [alike(x, 1e-5) for x in values]
        agreed = same.index(False) if False in same else 0
        fixed = all(x == values[0] for x in values) and not any(same[:1])
        if name.startswith(LAYER) and fixed and len(values) > 2:
            sure = states[0][0] == own[0][0] == 1 and len({*values[0][0]}) > 3
            (layers if sure and job.of(Input) else unsure).append(name)  # or a cache
        count = sum(a != b for a, b in pairwise(values[:agreed]))
        if name.startswith(COPY) and not any(same[-5:]) and len(same) > 9:
            unsure.append(name)  # perhaps only one rank's copy is used
        if not agreed or any(same[agreed:]) or not same[agreed + 2 :]:
            continue
        where, start = own[agreed][0], values[0][0]
        changes = [len({*map(tuple, own)}) for own in zip(*values, strict=True)]
        stale = min(changes) == 1 and len({*start[:7]}) > 3
        lasts = "()" not in name  # a function's variable may be a sum
        middle = values[(agreed + len(values)) // 2]
        each = [{n for n, x in enumerate(own) if x != start[n]} for own in middle]
        parts = all(one - other for one, other in permutations(each, 2))
        gap = median(between(x, start) for x in values[agreed:])
        moved = [sum(map(ne, a[0], b[0])) for a, b in pairwise(values[agreed:])]
        moves = median(moved) > len(start) / 2
        if (
            (lasts and dealt(values))
            or count > 2
            or (gap < 0.2 and len({*start[:7]}) > 3 and median(moved))
        ):
            found.append((where, name))
        elif lasts and (stale or parts or (gap < 0.7 and moves)):
            unsure.append(name)
    if found:
        names = listed(sorted(x[1] for x in found))
        what = f"{names} are equal on all ranks until step {min(found)[0]}, then differ"
        yield Breach(what, job.of(Step)[0].place)
    if layers:
        what = f"the ranks have different, constant numbers in {listed(sorted(layers))}"
        mend = "Register this tensor as a buffer before DDP wraps the network."
        yield Breach(what, job.of(Step)[0].place, mend=mend)
    if unsure:
        text = "differ between the ranks, perhaps because they are each rank's own"
        raise Doubt(f"{listed(sorted(unsure))} {text}")


def between(ranks: list[list[float]], start: list[float]) -> float:
    """Return how far apart ranks' tensors are, divided by how far they have moved."""
    most = max(math.dist(ranks[0], one) for one in ranks[1:])
    return most / (min(math.dist(start, one) for one in ranks) or most)
