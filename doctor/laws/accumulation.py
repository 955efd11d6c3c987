"""Law 5: a step is the mean over all samples. Several passes in a step."""

from statistics import median

from ..law import (
    RISK,
    SLOW,
    Breach,
    check,
    need,
)
from .gradient import not_averaged, not_cleared, summed
from .passes import LAW, Update, Wrapped
from .replicas import weights_differ


@check(LAW, RISK, causes=[not_cleared], read="tutorial/07_accumulation/README.md")
def leaked_passes(job):
    """Gradients of left-over micro-batches leak into a later step.

    Step also after the last, smaller group of an epoch (and divide by its size), or
    call zero_grad() at the start of each epoch.
    Not a mistake if: the number of passes per step is meant to vary.
    """
    for process in job.processes[:1]:
        steps = [one for one in process.of(Update) if one.passes]
        for optimizer in {one.optimizer for one in steps}:
            own = [one for one in steps if one.optimizer == optimizer]
            usual = median(len(one.passes) for one in own)
            found = [one for one in own if len(one.passes) > usual and spans(one)]
            if found:
                one = found[0]
                what = (
                    f"step {one.step + 1} adds up {len(one.passes)} backward passes, "
                )
                epochs = sorted({x["epoch"] for x in one.passes})
                what += (
                    f"others {usual:g}: batches of epochs {epochs[0]} and {epochs[-1]}"
                )
                what += f" ({len(found)} of {len(own)} steps)"
                yield Breach(what, one.passes[0]["place"])


def spans(one: Update) -> bool:
    """Return whether passes of one step have batches of several epochs of a loader."""
    epochs = {}
    for entry in one.passes:
        if entry["loader"] is not None:
            epochs.setdefault(entry["loader"], set()).add(entry["epoch"])
    return any(len(found) > 1 for found in epochs.values())


@check(
    LAW,
    RISK,
    causes=[weights_differ, summed],
    read="tutorial/07_accumulation/README.md",
)
def unequal_means(job):
    """Targets of one step have different weights.

    Sum the losses (reduction="sum"), and divide by the number of the targets of all
    passes on all ranks (DDP averages over ranks: multiply by the world size).
    Not a mistake if: each batch should have the same weight.
    """
    seen, found = 0, []
    for row in job.rows(Update):
        passes = [one for x in row for one in x.passes]
        single = [len(one.get("terms", ())) == 1 for one in passes]
        if len(passes) < 2 or not all(single) or not all(x["count"] for x in passes):
            continue
        kinds = [one["terms"][0][1] for one in passes]
        if "" in kinds:
            continue
        counts = [x["count"] if "mean" in x["terms"][0][1] else 1 for x in passes]
        pairs = zip(passes, counts, strict=True)
        weights = [abs(one["terms"][0][0]) / count for one, count in pairs]
        seen += 1
        found += [row[0]] * (max(weights) > 1.1 * min(weights))
    need(seen, "no losses with known numbers of targets were seen")
    if len(found) > seen / 2:
        what = f"in {len(found)} of {seen} steps, losses are means over different "
        what += "numbers of targets, but have equal weights"
        yield Breach(what, found[0].passes[0]["place"])


@check(LAW, SLOW, causes=[not_averaged], read="tutorial/07_accumulation/README.md")
def every_micro_batch(job):
    """DDP averages gradients in each pass of a step.

    Use model.no_sync() in all passes of a step except the last.
    """
    need(job.of(Wrapped), "DDP is not used")
    for row in job.rows(Update):
        passes = row[0].passes
        forwards = [one["forwards"][-1] for one in passes if one["forwards"]]
        places = {one["place"] for one in passes}
        if len(passes) > 1 and sum(forwards) >= len(passes) and len(places) == 1:
            what = f"DDP averages gradients {len(passes)} times per step"
            yield Breach(what, passes[0]["place"])
            return


@check(LAW, RISK, causes=[not_cleared], read="tutorial/07_accumulation/README.md")
def cleared_passes(job):
    """The gradients of some passes are cleared before the step uses them.

    Call zero_grad() once per step, not once per pass.
    Not a mistake if: these passes are not meant to count.
    """
    steps = [one for one in need(job.of(Update), "no step was seen") if one.passes]
    found = [x for x in steps if {*x.lost} & {one["place"] for one in x.passes}]
    if steps and len(found) > len(steps) / 2:
        one = found[0]
        what = (
            f"in {len(found)} of {len(steps)} steps, the gradients of some passes are "
        )
        what += f"cleared before the step ({len(one.lost)} in step {one.step + 1})"
        yield Breach(what, one.lost[0])
