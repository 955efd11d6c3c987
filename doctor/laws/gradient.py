"""Law 5: a step is the mean over all samples. Averages over ranks, and clipping."""

import math

from ..job import Job
from ..law import (
    NOTE,
    RISK,
    WRONG,
    Breach,
    check,
    need,
    several,
)
from ..sample import digest
from .passes import LAW, NotAwaited, Update, Wrapped
from .replicas import (
    alike,
    buffers_differ,
    equal_steps,
    listed,
    own_buffers,
    weights_differ,
    weights_differ_in_the_end,
    weights_drift,
)
from .schedule import learning_rates_differ


def updates(job: Job) -> list[list[Update]]:
    """Return the steps in which all ranks update the same weights after a pass."""
    several(job)
    found = []
    for row in job.rows(Update):
        finite = all(map(math.isfinite, [x for one in row for x in one.used]))
        same = len({digest(one.names, one.optimizer) for one in row}) == 1
        if same and finite and all(one.passes for one in row) and row[0].names:
            found.append(row)
    why = "no step with unsharded weights was seen on all ranks after a backward pass"
    return need(found, why)


def apart(row: list[Update], lists: list[list[float]]) -> list[int]:
    """Return the numbers of the weights for which the ranks' lists differ."""
    parts = range(len(row[0].names))
    return [n for n in parts if not alike([row[0].part(x, n) for x in lists])]


def final(row: list[Update]) -> list[list[float]]:
    """Return each rank's gradients before it clips them, or the used ones."""
    clipped = [one.clips and one.clips[0]["before"] for one in row]
    clipped = [one for one in clipped if one and any(one)]
    return clipped if len(clipped) == len(row) else [one.used for one in row]


def ratio(row: list[Update]) -> tuple[float, float]:
    """Return the used gradient over the mean of the local ones, and the residual.

    The residual is the share of weights whose used gradient is not this multiple.
    """
    ranks = zip(*(one.local for one in row), strict=True)
    mean, own = [sum(values) / len(row) for values in ranks], final(row)[0]
    scale = next((x["scale"] for x in row[0].passes if x["scale"]), 1) or 1
    square = sum(x * x for x in mean)
    if not square:
        return math.nan, 0
    value = sum(a * b for a, b in zip(mean, own, strict=True)) / square
    pairs = [
        (row[0].part(mean, n), row[0].part(own, n)) for n in range(len(row[0].names))
    ]
    pairs = [(one, other) for one, other in pairs if any(one) or any(other)]
    off = [not alike([[value * x for x in one], other], 0.1) for one, other in pairs]
    good = near(value * scale, 1) and (scale == 1 or not near(value, 1))
    return value * scale if good else value, sum(off) / max(1, len(off))


def raw(row: list[Update]) -> bool:
    """Return whether the used gradients are the local ones' mean, scale included."""
    ranks = zip(*(one.local for one in row), strict=True)
    mean = [sum(values) / len(row) for values in ranks]
    return any(mean) and alike([mean, row[0].used], 0.01)


def same_scale(row: list[Update]) -> bool:
    """Return whether all passes of a step have the same scale, and nothing clips."""
    return len({x["scale"] for x in row[0].passes}) == 1 and not row[0].clips


def near(one: float, other: float, tolerance: float = 0.02) -> bool:
    """Return whether a number is near another one."""
    return abs(one - other) <= tolerance * abs(other)


@check(
    LAW,
    WRONG,
    causes=[weights_differ],
    effects=[weights_drift, buffers_differ, own_buffers, weights_differ_in_the_end],
    read="tutorial/11_hangs/README.md",
)
def not_averaged(job):
    """The ranks step with different gradients.

    Wrap the network in DistributedDataParallel, and call the DDP model.
    """
    steps = [row for row in updates(job) if any(row[0].used)]
    found = [(row, apart(row, final(row))) for row in steps]
    found = [(row, names) for row, names in found if names]
    if not found:
        seen = any(not alike([one.local for one in row]) for row in steps)
        need(seen, "the ranks' own gradients are equal, or were not seen")
        return
    (row, differ), own = found[0], found[0][0][0]
    names, place = [own.names[n] for n in differ], own.passes[-1]["place"]
    what = f"in {len(found)} of {len(steps)} steps, from step {own.step + 1} on, the "
    what += "ranks use different gradients: "
    later = [x for x in updates(job) if x[0].step > own.step]
    reason, mend, level = reason_of(job, row, names, later)
    yield Breach(what + reason, place, mend=mend, level=level)


def reason_of(job: Job, row: list[Update], names: list[str], later) -> tuple:
    """Return why gradients are not averaged, what to do, and the level."""
    own, wrapped = row[0], bool(job.of(Wrapped))
    forwards = [one["forwards"][-1] for one in own.passes if one["forwards"]]
    flags, count = [one["flag"] for one in own.passes], len(own.passes)
    if wrapped and not forwards:
        mend = "Call model(x), not model.module(x) or the network inside."
        return "DDP's forward() is not called, and so DDP averages nothing", mend, ""
    if wrapped and not forwards[-1]:
        done = [n + 1 for n, one in enumerate(forwards) if one]
        if flags[-1]:  # it was set between forward() and backward()
            what = (
                f"DDP averages pass {done[0]} of {count}, but not the last one"
                if done
                else ""
            )
            what = what or "DDP averages no pass"
            mend = (
                "Set require_backward_grad_sync before the forward pass: DDP reads it "
            )
            mend += "there."
            return what + ", because the flag is set after forward()", mend, ""
        what = f"no_sync() is active in {forwards.count(False)} of {count} passes"
        mend = "Use no_sync() in all passes of a step except the last."
        return what + ", also in the last one", mend, ""
    total = sum(any(own.part(own.used, n)) for n in range(len(own.names)))
    if len(names) < total:
        mend = "Average these weights, too. With DDP, create all weights, and let them "
        mend += "require gradients, before you wrap the network; use its forward()."
        what = f"{len(names)} of {total} weights are not averaged: "
        return what + listed(names), mend, ""
    if not wrapped and any(same for step, same in equal_steps(job) if step > own.step):
        mend = "Nothing, if you average weights instead of gradients."
        return "their weights become equal again, as in local SGD", mend, NOTE
    return "nothing averages them", "", ""


@check(
    LAW,
    RISK,
    causes=[not_averaged, learning_rates_differ],
    read="tutorial/03_gradients/README.md",
)
def summed(job):
    """The used gradients are the sum over the ranks, or are divided twice.

    Divide by the world size once. DDP and Horovod do that; all_reduce() does not.
    Not a mistake if: the learning rate accounts for it.
    """
    rows, size = updates(job), len(job.processes)
    for row in rows:
        scale = row[0].passes[-1]["scale"]
        if scale not in (None, 1) and same_scale(row) and raw(row):
            what = f"the gradients of step {row[0].step + 1} are still {scale:g} times "
            mend = "Call scaler.step(optimizer), not optimizer.step()."
            what += "too large: nothing unscales them"
            yield Breach(what, row[0].place, level=WRONG, mend=mend)
            return
    pairs = [ratio(row) for row in rows if not row[0].clips]
    values = [value for value, off in pairs if value == value and not off]
    first = values[0] if len(values) > 2 else 1
    if all(near(x, first, 0.01) for x in values):
        if not any(near(first, x) for x in (1, size, 1 / size)):
            what = (
                f"{len(values)} of {len(rows)} steps use {first:.3g} times the mean of "
            )
            yield Breach(f"{what}the {size} ranks' gradients", rows[0][0].place)
            return
    for value, how in ((size, "the sum"), (1 / size, f"1/{size} of the mean")):
        found = [row for row in rows if near(ratio(row)[0], value)]
        if len(found) > len(rows) / 2:
            what = f"{len(found)} of {len(rows)} steps use {how} of the {size} ranks' "
            yield Breach(f"{what}gradients", found[0][0].place)
            return
        parts = uneven(rows, value)
        if parts:
            what = (
                f"for {len(parts)} weights, the steps use {how} of the {size} ranks' "
            )
            yield Breach(f"{what}gradients: {listed(parts)}", rows[0][0].place)


def uneven(rows: list[list[Update]], value: float) -> list[str]:
    """Return the weights whose used gradient has this factor in most steps."""
    found, seen = {}, {}
    for row in rows:
        if row[0].clips:
            continue
        for number, name in enumerate(row[0].names):
            locals_ = [one.part(one.local, number) for one in row]
            mean = [sum(x) / len(row) for x in zip(*locals_, strict=True)]
            used, square = row[0].part(row[0].used, number), sum(x * x for x in mean)
            if square and alike([[value * x for x in mean], used], 0.01):
                found[name] = found.get(name, 0) + 1
            seen[name] = seen.get(name, 0) + bool(square)
    return [x for x in found if found[x] > seen[x] / 2 and seen[x] > 2]


@check(
    LAW,
    WRONG,
    effects=[not_averaged, summed, weights_drift, weights_differ_in_the_end],
    read="tutorial/09_mixed_precision/README.md",
)
def clip_order(job):
    """Gradients are clipped before they are unscaled or averaged.

    Clip once per step, after scaler.unscale_(optimizer) and after the gradients are
    averaged.
    Not a mistake if: the gradients are meant to change after they are clipped.
    """
    rows = [row for row in updates(job) if row[0].clips]
    for row in need(rows, "no gradients are clipped"):
        what, own = f"in step {row[0].step + 1} ", row[0]
        first, last = own.clips[0], own.clips[-1]
        if first["scaled"]:
            text = f"{what}gradients are clipped before they are unscaled"
            yield Breach(text, first["place"])
            return
        before = [one.clips[0]["before"] for one in row if one.clips]
        own_grads = len(before) == len(row) and all(map(any, before))
        if own_grads and not alike(before) and alike([one.used for one in row]):
            text = f"{what}each rank clips its own gradient, before the average"
            yield Breach(text, first["place"])
            return
        if last["norm"] and any(last["before"]) and changed(last["before"], own.used):
            text = f"{what}gradients change after they are clipped"
            yield Breach(text, last["place"], level=RISK)
            return
        passes = len(own.passes)
        if len({one["passes"] for one in own.clips}) == passes > 1:
            text = f"{what}each micro-batch's gradients are clipped"
            yield Breach(text, last["place"], level=RISK)
            return


def changed(before: list[float], after: list[float]) -> bool:
    """Return whether one list is not a positive multiple of the other, up to 1 %."""
    square = sum(x * x for x in before)
    value = sum(a * b for a, b in zip(before, after, strict=True)) / (square or 1)
    return value <= 0 or not alike([[value * x for x in before], after], 0.01)


@check(
    LAW,
    WRONG,
    effects=[
        not_averaged,
        summed,
        clip_order,
        weights_drift,
        weights_differ_in_the_end,
    ],
    read="tutorial/08_collectives/README.md",
)
def not_awaited(job):
    """A step uses gradients before all_reduce() has ended.

    Call wait() of each all_reduce(..., async_op=True) before you use the gradient.
    """
    several(job)
    if found := job.of(NotAwaited):
        names = listed([*dict.fromkeys(one.name for one in found)])
        what = f"step {found[0].step + 1} begins before all_reduce(..., async_op=True) "
        yield Breach(f"{what}of gradients is awaited: {names}", found[0].place)


@check(LAW, WRONG, effects=[summed], read="tutorial/03_gradients/README.md")
def not_cleared(job):
    """A step contains the gradients of steps before it.

    Call optimizer.zero_grad() once per step.
    """
    steps = need(job.of(Update), "no step was seen")
    if found := [one for one in steps if one.stale]:
        one = found[0]
        what = f"in step {one.step + 1}, {len(one.stale)} weights still have the "
        what += f"gradients of an earlier step: {listed(one.stale)}"
        place = one.passes[0]["place"] if one.passes else one.place
        yield Breach(what, place)


@check(LAW, WRONG, read="tutorial/16_sharded/README.md")
def shards_scaled_apart(job):
    """Each rank scales its shards of the gradients by a factor of its own.

    Clip with torch.nn.utils.clip_grad_norm_() of the whole parameters: a norm of local
    shards differs between ranks.
    """
    several(job)
    rows = [x for x in job.rows(Update) if all(one.factor for one in x)]
    need(rows, "no weights are sharded")
    found = [row for row in rows if not alike([[one.factor] for one in row], 0.01)]
    if len(found) > len(rows) / 2:
        factors = ", ".join(f"{one.factor:.3g}" for one in found[0])
        what = f"in {len(found)} of {len(rows)} steps, the ranks scale their shards of "
        what += f"the gradients by different factors (in step {found[0][0].step + 1}: "
        yield Breach(f"{what}{factors})", found[0][0].place)
