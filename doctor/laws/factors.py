"""Law 5: a step uses the mean over all samples. Finds gradients with wrong factors."""

import math
from collections import Counter
from statistics import median

from ..law import NOTE, RISK, WRONG, Breach, explains
from .gradient import near
from .losses import known
from .mean import is_right, mean_gradient, totals


@explains(mean_gradient, read="lesson 3")
def summed(job, breach):
    """The gradients are not averaged over the ranks: they are summed or divided twice.

    Divide by the world size once. DDP and Horovod do that; all_reduce() does not.
    Not a mistake if: the learning rate accounts for this factor.
    """
    if not (found := breach.facts):
        return None
    values, size = [x.factor for x in found], len(job.processes)
    usual, scale = median(values), found[0].row[0].passes[-1]["scale"]
    if scale not in (None, 1) and near(values[0], scale):
        what = f"the gradients are {scale:g} times too large: nothing unscales them"
        mend = "Call scaler.step(optimizer), not optimizer.step()."
        return Breach(what, level=WRONG, mend=mend)
    count, how = sum(near(x, usual) for x in values), f"{usual:.3g} times the mean"
    if near(usual, size) or near(usual, 1 / size):
        how = "the sum" if usual > 1 else f"1/{size} of the mean"
    else:
        exponent = math.log2(usual) if usual > 0 else 0
        # A library may scale the loss by a power of two, and unscale the gradients
        scaled = exponent < -7 and abs(exponent - round(exponent)) < 1e-3
        if near(usual, 1) or scaled or count < max(3, len(values)):
            return None
    what = f"{count} of {len(found)} steps use {how} of the {size} ranks' gradients"
    return Breach(what) if count > len(values) / 2 else None


@explains(mean_gradient, read="docs/convert.md")
def summed_loss(job, breach):
    """The loss is a sum over samples, and DDP averages the ranks' gradients.

    Multiply the loss by the world size, or use the mean over a rank's samples (or
    targets) if all ranks have equally many.
    Not a mistake if: the learning rate accounts for this factor.
    """
    found = breach.facts or []
    tied, plain, rows, size = [], [], set(), len(job.processes)
    for one in found:
        entry = one.row[0].passes[-1]
        terms = known(entry)
        if {x.kind for x in terms} == {"sum"} and near(one.factor, 1):
            products = [(abs(terms[0].factor) * x, x) for x in entry["sums"] if x > 1]
            tied += [x for product, x in products if near(product, 1, 1e-4)][:1]
            plain += {f"{abs(x.factor):.4g}" for x in terms if abs(x.factor) > 0.99}
            rows |= {(x.rows, x.each) for x in terms}
    if len(tied) > len(found) / 2:
        what = f"the loss is divided by a sum over all ranks ({tied[0]:g} in step 1), "
        mend = f"Multiply the loss by {size}, the world size."
        return Breach(f"{what}and averaged over {size} ranks again", mend=mend)
    # A number of targets, by which the script divides, would change between steps
    if max(Counter(plain).values(), default=0) > 0.9 * len(found):
        constant = len(rows) == 1 and {x for _, x in rows} == {1}  # only a factor
        what = f"each rank sums its samples' losses, and {size} ranks are averaged"
        return Breach(what, level=NOTE if constant else RISK)
    return None


@explains(mean_gradient, read="lesson 7")
def loss_scale(job, breach):
    """The loss is divided by a number other than the number of passes per step.

    With n micro-batches, divide each one's mean loss by n. DDP averages over the ranks.
    Not a mistake if: the learning rate accounts for this factor, or you intend it.
    """
    found, counts, size = breach.facts or (), Counter(), len(job.processes)
    for one in found:
        passes = one.row[0].passes
        terms, count = [x for entry in passes for x in known(entry)], len(passes)
        half = [x.kind for x in terms] == ["other mean"]  # of squares, for example
        means = len(terms) == count and all("mean" in x.kind for x in terms)
        same = len({entry["place"] for entry in passes}) == 1 and near(one.factor, 1)
        if half or not (means and same) or is_right(one):
            continue
        hows = {
            f"is not divided by {count}": 1,
            f"is divided by {count} twice": 1 / count**2,
            f"is divided by {size}, the world size": 1 / count / size,
            f"is multiplied by {size}, the world size": size / count,
        }
        value = [*totals(one), 0.0][0] / count
        fits = [how for how, number in hows.items() if near(value, number, 0.002)]
        counts.update((how, count) for how in fits[:1])
    for (how, count), steps in counts.most_common(1):
        if steps >= 0.3 * len(found):
            passes = f"{count} passes, each with " * (count > 1)
            return Breach(f"a step has {passes}a mean loss that {how}")
    return None
