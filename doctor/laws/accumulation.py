"""Law 5: a step is the mean over all samples. Several passes in a step."""

from statistics import median

from ..law import RISK, SLOW, Breach, check, need
from .gradient import fits, not_averaged, not_cleared
from .mean import known, mean_gradient, unequal, weights
from .passes import LAW, PASSES, Update
from .replicas import weights_differ
from .states import Layout


@check(LAW, RISK, causes=[not_cleared], effects=[mean_gradient], read=PASSES)
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
                epochs = sorted({x["epoch"] for x in one.passes})
                what = f"step {one.step + 1} adds up {len(one.passes)} backward "
                what += f"passes, others {usual:g}: batches of epochs {epochs[0]} and "
                what += f"{epochs[-1]} ({len(found)} of {len(own)} steps)"
                yield Breach(what, one.passes[0]["place"])


def spans(one: Update) -> bool:
    """Return whether passes of one step have batches of several epochs of a loader."""
    epochs = {}
    for entry in one.passes:
        if entry["loader"] is not None:
            epochs.setdefault(entry["loader"], set()).add(entry["epoch"])
    return any(len(found) > 1 for found in epochs.values())


@check(LAW, RISK, causes=[weights_differ, not_averaged, mean_gradient], read=PASSES)
def unequal_means(job):
    """Targets of one step have different weights.

    Sum the losses (reduction="sum"), and divide by the number of the targets of all
    passes on all ranks (DDP averages over ranks: multiply by the world size).
    Not a mistake if: each batch should have the same weight.
    """
    seen = []
    for one in fits(job):
        passes = [entry for rank in one.row for entry in rank.passes]
        terms = [known(entry) for entry in passes]
        single = all(len(x) == 1 and x[0].kind in ("mean", "sum") for x in terms)
        if len(passes) > 1 and single:
            seen.append((one, unequal(weights(one))))
    need(seen, "no losses with known numbers of targets were seen")
    found = [one for one, differ in seen if differ]
    if len(found) > len(seen) / 2:
        what = f"in {len(found)} of {len(seen)} steps, losses are means over different "
        what += "numbers of targets, but have equal weights"
        yield Breach(what, found[0].row[0].passes[0]["place"])


@check(LAW, SLOW, causes=[not_averaged], read=PASSES)
def every_micro_batch(job):
    """DDP averages gradients in each pass of a step.

    Use model.no_sync() in all passes of a step except the last.
    """
    need(job.of(Layout), "DDP is not used")
    for row in job.rows(Update):
        passes = row[0].passes
        forwards = [one["forwards"][-1] for one in passes if one["forwards"]]
        places = {one["place"] for one in passes}
        if len(passes) > 1 and sum(forwards) >= len(passes) and len(places) == 1:
            what = f"DDP averages gradients {len(passes)} times per step"
            yield Breach(what, passes[0]["place"])
            return


@check(LAW, RISK, causes=[not_cleared], read=PASSES)
def cleared_passes(job):
    """The gradients of some passes are cleared before the step uses them.

    Call zero_grad() once per step, not once per pass.
    Not a mistake if: these passes are not meant to count.
    """
    steps = [one for one in need(job.of(Update), "no step was seen") if one.passes]
    found = [x for x in steps if {*x.lost} & {one["place"] for one in x.passes}]
    if steps and len(found) > len(steps) / 2:
        one = found[0]
        what = f"in {len(found)} of {len(steps)} steps, the gradients of some passes "
        what += f"are cleared before the step ({len(one.lost)} in step {one.step + 1})"
        yield Breach(what, one.lost[0])
