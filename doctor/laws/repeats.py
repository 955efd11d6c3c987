"""Law 1: every sample is read once per epoch. Finds batches that a step repeats."""

from collections import Counter

from ..job import Process
from ..law import RISK, Breach, check, need, several
from ..loaders import Batch
from ..neighbours import Input
from .passes import Update
from .replicas import alike
from .samples import LAW


@check(LAW, RISK, read="lesson 4")
def same_passes(job):
    """All passes of a step train on the same batch.

    Copy each batch, with clone(), before its reader fills the same tensors again.
    Not a mistake if: each step is meant to use one batch several times, as with several
    draws of noise.
    """
    several(job)
    found = []
    for process in job.processes:
        many = [x for x in process.of(Update) if len(x.passes) > 2]
        many = [x for x in many if all(y["begun"] == x.step for y in x.passes)]
        need(many, "no step has more than two passes")
        found.append((repeated(process, many), many))
        if len(found[-1][0]) < max(4, 0.9 * len(many)):
            return
    batches, many = found[0]
    if len({tuple(one.rows) for one in batches}) > 0.9 * len(batches):
        count = len(many[0].passes)
        what = f"in {len(batches)} of {len(many)} steps, the {count} passes of a rank "
        what += f"have the same inputs and targets ({len(batches[0].rows)} samples "
        yield Breach(f"{what}{count} times in a step)", batches[0].place)


def repeated(process: Process, updates: list[Update]) -> list[Input]:
    """Return the batches on which all passes of one of these steps have trained."""
    inputs, found = {}, []
    for one in process.of(Input):
        if not one.made:
            own = inputs.setdefault(one.step, {})
            own.setdefault(one.network, []).append(one)
    read = Counter(one.step for one in process.of(Batch))
    for update in updates:
        count, own = len(update.passes), [*inputs.get(update.step, {}).values()]
        own = [x for x in own if len(x) % count == 0]  # this many per pass
        first = next((x[0] for x in own), None)
        if not first or (first.loaded and read[update.step] < count):
            continue  # one batch serves all passes
        values = [[one["value"]] for one in update.passes]
        targets = {one.get("target") for one in update.passes}
        same = len(targets) == 1 and targets != {None}
        same = same or (any(values[0]) and alike(values, 1e-9))
        lines = {one["place"] for one in update.passes}
        if same and len(lines) < 3 and all(periodic(x, len(x) // count) for x in own):
            found.append(first)
    return found


def periodic(own: list[Input], each: int) -> bool:
    """Return whether inputs repeat the `each` inputs of the first pass."""
    pairs = zip(own, own[each:], strict=False)
    return all((a.rows, a.arguments) == (b.rows, b.arguments) for a, b in pairs)
