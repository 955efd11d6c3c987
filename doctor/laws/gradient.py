"""Law 5: a step uses the mean over all samples. Compares the ranks' gradients."""

import math
from dataclasses import dataclass
from functools import cache
from statistics import median, median_high

from ..event import Exit
from ..job import Job
from ..law import NOTE, RISK, WRONG, Breach, check, need, several
from ..moments import Wraps
from .losses import by_share
from .meeting import ZEROS, collectives_differ, one_network, same_steps
from .passes import LAW, Update, not_awaited
from .replicas import (
    AGAIN,
    alike,
    consensus,
    equal_steps,
    frozen,
    listed,
    parts_of_layers,
    weights_differ,
    weights_drift,
)
from .states import INNER, copies

CAUSES = weights_differ, not_awaited, collectives_differ  # of unequal gradients
UNKNOWNS = 12  # maximum number of passes (on all ranks) whose shares doctor computes


@dataclass
class Fit:
    """How the gradient that a step uses depends on the ranks' own gradients."""

    row: list[Update]
    factor: float  # the used gradient, divided by the mean of the ranks' own gradients
    passes: list[dict]  # the passes of rank 0, of rank 1, and so on
    shares: list[float]  # how much each of these passes counts
    solved: bool  # if false, doctor assumes that all passes count equally
    # Each weight's gradient divided by that of these passes (NaN if they are not
    # proportional), and by the median ratio
    ratios: dict[str, float]


def updates(job: Job) -> list[list[Update]]:
    """Return steps after a backward pass that update the same weights on all ranks."""
    several(job)
    need(not job.apart, job.apart)
    same_steps(job)
    one_network(job)
    need(len(copies(job)) < 5, INNER)
    found = []
    for row in job.rows(Update):
        same = len({(one.optimizer, *one.names) for one in row}) == 1
        finite = all(math.isfinite(x) for one in row for x in one.used)
        if same and finite and row[0].names and all(one.passes for one in row):
            found.append(row)
    why = "no step with unsharded weights was seen on all ranks after a backward pass"
    return need(found, why)


def own(one: Update) -> list[list[float]]:
    """Return a rank's own gradients of each pass, divided by the pass's loss scale."""
    pairs = zip(one.local, one.passes, strict=False)
    return [[x / (entry["scale"] or 1) for x in values] for values, entry in pairs]


def summed_up(vectors: list[list[float]]) -> list[float]:
    """Return the elementwise sum of several vectors."""
    return [sum(values) for values in zip(*vectors, strict=True)]


def sums(row: list[Update]) -> list[list[float]]:
    """Return the sums of the ranks' own gradients in a step."""
    return [summed_up(own(one)) for one in row]


def final(row: list[Update]) -> list[list[float]]:
    """Return the ranks' gradients before clipping, or else those that the step uses."""
    found = []
    for one in row:
        values = one.clips[0]["before"] if one.clips else []
        scale = one.clips and one.clips[0]["scaled"] and one.passes[-1]["scale"]
        found += [[x / (scale or 1) for x in values]] if any(values) else []
    return found if len(found) == len(row) else [one.used for one in row]


@cache
def fits(job: Job) -> list[Fit]:
    """Return the Fit of each step for which it can be computed."""
    return [one for row in updates(job) if (one := fit(row))]


def fit(row: list[Update]) -> Fit | None:
    """Return the Fit of a step, or None if it cannot be computed."""
    used, vectors = final(row), [x for one in row for x in own(one)]
    clips = [one.clips for one in row if one.clips]
    seen = all(len(x) == 1 and any(x[0]["before"]) for x in clips)
    if not seen or not alike(used) or not any(used[0]) or alike(sums(row)):
        return None
    target, mean = used[0], [x / len(row) for x in summed_up(vectors)]
    factor = multiple(mean, target)
    there = sum(map(any, zip(target, *vectors, strict=True)))
    enough = len(vectors) <= min(UNKNOWNS, there / 2)
    shares = (enough and shares_of(vectors, target)) or [0.0] * len(vectors)
    guess = [dot(shares, values) for values in zip(*vectors, strict=True)]
    if not (solved := alike([target, guess], 0.03)):
        shares = [factor / len(row)] * len(vectors)
        guess = [factor * x for x in mean]
    ratios, totals = {}, sums(row)
    for number, name in enumerate(row[0].names):
        before, after = row[0].part(guess, number), row[0].part(target, number)
        each = [row[0].part(x, number) for x in totals]
        if any(before) and not alike(each):  # or else, it may be the mean already
            ratio = multiple(before, after)
            fits = alike([[ratio * x for x in before], after], 0.1)
            ratios[name] = ratio if fits else math.nan
    usual = median_high([x for x in ratios.values() if abs(x) > 0] or [1.0])
    ratios = {name: x / usual for name, x in ratios.items()}
    passes = [entry for one in row for entry in by_share(one)]
    return Fit(row, factor, passes, shares, solved, ratios)


def multiple(one: list[float], other: list[float]) -> float:
    """Return the factor that brings the first vector closest to the other one."""
    square = dot(one, one)
    return dot(one, other) / square if square else math.nan


def dot(one: list[float], other: list[float]) -> float:
    """Return the dot product of two vectors."""
    return sum(a * b for a, b in zip(one, other, strict=True))


def shares_of(vectors: list[list[float]], target: list[float]) -> list[float] | None:
    """Return the factors of vectors that give the target, or None if they are unsure.

    Factors of nearly dependent vectors are sure if two halves of the elements agree.
    """
    if (found := solve(vectors, target)) or len(target) < 4 * len(vectors):
        return found
    halves = [([x[n::2] for x in vectors], target[n::2]) for n in (0, 1)]
    found = [solve(*half, least=1e-6) for half in halves]
    return found[0] if all(found) and alike(found, 0.02) else None


def solve(
    vectors: list[list[float]], target: list[float], least: float = 1e-3
) -> list[float] | None:
    """Return the least-squares factors of vectors, or None if they are dependent."""
    norms = [math.hypot(*x) for x in vectors]
    if not all(norms):
        return None
    units = [[x / n for x in own] for own, n in zip(vectors, norms, strict=True)]
    rows = [[*(dot(one, x) for x in units), dot(one, target)] for one in units]
    for n, row in enumerate(rows):  # Gaussian elimination
        if abs(row[n]) < least:
            return None
        for other in rows:
            if other is not row:
                factor = other[n] / row[n]
                other[:] = [a - factor * b for a, b in zip(other, row, strict=True)]
    return [row[-1] / row[n] / norms[n] for n, row in enumerate(rows)]


def near(one: float, other: float, tolerance: float = 0.02) -> bool:
    """Return whether two numbers are nearly equal."""
    return abs(one - other) <= tolerance * abs(other)


@check(LAW, WRONG, causes=CAUSES, effects=[weights_drift], read="pitfall 11")
def not_averaged(job):
    """The ranks take their steps with different gradients.

    Wrap the network in DistributedDataParallel, and call the DDP model.
    """
    steps = [row for row in updates(job) if any(row[0].used)]
    parts = parts_of_layers(job)
    found = [(row, [x for x in apart(row) if x not in parts]) for row in steps]
    found = [(row, names) for row, names in found if names]
    seen = found or any(not alike(sums(row)) for row in steps)
    need(seen, "the ranks' own gradients are equal, or were not seen")
    for row, names in found[:1]:
        reason, mend, level = reason_of(job, row, names)
        what = f"in {len(found)} of {len(steps)} steps, the gradients differ: {reason}"
        yield Breach(what, row[0].passes[-1]["place"], mend=mend, level=level)


def apart(row: list[Update]) -> list[str]:
    """Return the weights whose gradients differ between the ranks."""
    lists, names = final(row), enumerate(row[0].names)
    return [x for n, x in names if not alike([row[0].part(y, n) for y in lists])]


def reason_of(job: Job, row: list[Update], names: list[str]) -> tuple:
    """Return the reason why gradients are not averaged, the advice and the level."""
    one, layouts = row[0], job.processes[0].of(Wraps)
    forwards = [x["forwards"][-1] for x in one.passes if x["forwards"]]
    if layouts and not forwards:
        mend = "Call model(x), not model.module(x) or the network inside."
        return "DDP's forward() is not called, so DDP averages nothing", mend, ""
    if layouts and not forwards[-1]:
        if one.passes[-1]["flag"]:  # set between forward() and backward()
            mend = "Set require_backward_grad_sync before forward(), which reads it."
            return "DDP's flag is set after forward(), which is too late", mend, ""
        mend = "Use no_sync() in all passes of a step except the last."
        return "no_sync() is also active in a step's last pass", mend, ""
    total = sum(any(one.part(one.used, n)) for n in range(len(one.names)))
    if len(names) < total:
        what = f"{len(names)} of {total} weights are not averaged: {listed(names)}"
        mend = "Average these weights, too. With DDP, create them before you wrap the "
        mend += "network, and use its forward()."
        told = frozen(job, names, one.step)
        there = [
            {n for n in names if any(x.part(x.used, x.names.index(n)))} for x in row
        ]
        if any(x != there[0] for x in there) and not layouts:
            mend = ZEROS
        return what + told, AGAIN if told else mend, ""
    if not layouts and equal_steps(job, one.step):
        mend = "Change nothing if you average weights instead of gradients."
        return "their weights become equal again, as in local SGD", mend, NOTE
    mean = [x / len(row) for x in summed_up(sums(row))]
    pairs = zip(sums(row), final(row), strict=True)
    unequal = layouts and len({x.step for x in job.of(Exit)}) > 1
    need(not unequal, "the numbers of steps differ")
    consensus(job)
    if layouts and all(math.dist(x, mean) < math.dist(x, y) for y, x in pairs):
        mend = "Change gradients alike on all ranks, for example with noise that one "
        mend += "generator, with the same seed on all ranks, draws."
        what = f"DDP averages {listed(names)}, but the ranks then change them"
        return f"{what} differently", mend, ""
    return f"nothing averages {listed(names)}", "", ""


@check(LAW, RISK, read="lesson 5")
def copies_averaged(job):
    """DDP also averages the gradients of copies that train for a few steps each.

    Copy model.module, not the DDP model, so that each rank adapts copies of its own.
    Not a mistake if: all ranks are meant to train each copy together.
    """
    found, made = copies(job), len(job.processes[0].of(Wraps))
    steps = {step for own in found for step in own}
    for one in job.of(Update) if len(found) > max(4, made) and made < 20 else ():
        averages = any(x["forwards"][-1] for x in one.passes if x["forwards"])
        if averages and one.step in steps:
            count = len(found)
            what = f"DDP averages the gradients of {count} networks, but wraps {made}"
            yield Breach(what, one.passes[0]["place"])
            return


EFFECTS = not_averaged, weights_drift


@check(LAW, WRONG, causes=[not_awaited], effects=EFFECTS, read="lesson 9")
def clip_order(job):
    """Gradients are clipped before they are unscaled or averaged.

    Clip once per step, after scaler.unscale_(optimizer) and after averaging.
    Not a mistake if: the gradients are meant to change after they are clipped.
    """
    rows = [row for row in updates(job) if row[0].clips]
    for row in need(rows, "no gradients are clipped"):
        one, level = row[0], ""
        first, last = one.clips[0], one.clips[-1]
        places = {clip["place"] for clip in one.clips}
        if first["scaled"]:
            text = "gradients are clipped before they are unscaled"
        elif not alike(final(row)) and alike([x.used for x in row]):
            text = "each rank clips its own gradients before they are averaged"
        elif last["norm"] and any(last["before"]) and changed(one, last["before"]):
            text, level = "gradients change after they are clipped", RISK
        elif len(places) == 1 < len(one.clips) == len(one.passes) and first["before"]:
            text, level = f"gradients are clipped {len(one.clips)} times", RISK
        else:
            continue
        yield Breach(f"in step {one.step + 1}, {text}", last["place"], level=level)
        return


def changed(one: Update, before: list[float]) -> bool:
    """Return whether the gradients are no positive multiple of `before` (within 1 %).

    Weights whose gradients the script has removed do not count.
    """
    own = [n for n in range(len(one.names)) if any(one.part(one.used, n))]
    rows = [[x for n in own for x in one.part(row, n)] for row in (before, one.used)]
    value = multiple(*rows)
    rows[0] = [value * x for x in rows[0]]
    return bool(own) and (value <= 0 or not alike(rows, 0.01))


@check(LAW, WRONG, read="lesson 7")
def not_cleared(job):
    """Gradients are not cleared exactly once per step.

    Call optimizer.zero_grad() once per step, not less often, and not once per pass.
    Not a mistake if: the passes whose gradients are cleared are not meant to count.
    """
    steps = need(job.of(Update), "no step was seen")
    found = [x for x in steps if {*x.lost} & {one["place"] for one in x.passes}]
    if one := next((x for x in steps if x.stale), None):
        what = f"step {one.step + 1} also has older gradients: {listed(one.stale)}"
        yield Breach(what, one.passes[0]["place"] if one.passes else one.place)
    elif len(found) > 0.8 * sum(bool(x.passes) for x in steps):  # no rare skips
        what = f"in {len(found)} of {len(steps)} steps, unused gradients are cleared"
        yield Breach(what, found[0].lost[0], level=RISK)


@check(LAW, RISK, causes=[not_cleared], read="lesson 7")
def leaked_passes(job):
    """Gradients of leftover micro-batches leak into a later step.

    Also take a step after an epoch's last, smaller group of passes (and divide the
    losses by the group's size), or call zero_grad() at the start of each epoch.
    Not a mistake if: the number of passes per step is meant to vary.
    """
    need(job.of(Update), "no step was seen")
    steps = [one for one in job.processes[0].of(Update) if one.passes]
    for optimizer in {one.optimizer for one in steps}:
        own = [one for one in steps if one.optimizer == optimizer]
        usual = median(len(one.passes) for one in own)
        found = [one for one in own if len(one.passes) > usual and spans(one)]
        for one in found[:1]:
            what = f"{len(found)} of {len(own)} steps add passes of several epochs"
            yield Breach(what, one.passes[0]["place"])


def spans(one: Update) -> bool:
    """Return whether a step's passes use batches from several epochs of a loader."""
    epochs = {(x["loader"], x["epoch"]) for x in one.passes if x["loader"] is not None}
    return len(epochs) > len({loader for loader, _ in epochs})


EARLIER = weights_differ, not_awaited, not_averaged, not_cleared, leaked_passes
