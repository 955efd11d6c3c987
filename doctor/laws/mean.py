"""Law 5: a step uses the mean over all samples. Checks weights and their factors."""

from collections import Counter
from math import isnan, log2
from statistics import median, mode

from ..law import NOTE, RISK, WRONG, Breach, NotJudged, check, explains, need
from ..neighbours import Input
from .gradient import EARLIER, Fit, fits, near, sums, updates
from .losses import Term, cut_off, factors, known
from .passes import LAW, Update
from .replicas import alike, listed
from .states import late_network


def totals(one: Fit, place: str = "") -> list[float]:
    """Return how much the samples of all passes, or of one line's, may count."""
    pairs = [*zip(one.shares, one.passes, strict=True)]
    pairs = [(x, factors(entry)) for x, entry in pairs if place in ("", entry["place"])]
    weighted = [[share * x for x in own] for share, own in pairs]
    return [sum(values) for values in zip(*weighted, strict=False)]


def is_right(one: Fit) -> bool:
    """Return whether a step uses the mean over its samples for each of its losses."""
    places = {entry["place"] for entry in one.row[0].passes} - {""}
    entry, values = one.row[0].passes[0], totals(one)
    found = [[abs(x.factor) * y for y in entry["sums"] if y > 1] for x in known(entry)]
    if all(any(near(x, 1, 1e-4) for x in products) for products in found):
        values = values[:3]  # DDP divides again; do not add up the first few losses
    if any(near(abs(value), 1) for value in values) or divided(one):
        return True
    each = [any(near(value, 1) for value in totals(one, place)) for place in places]
    return len(each) > 1 and all(each)


def divided(one: Fit) -> bool:
    """Return whether losses are divided by an all-reduced sum, and not once more."""
    if len(one.passes) > len(one.row) or not counted(one.passes):
        return False
    share = abs(known(one.passes[0])[0].factor) / len(one.passes)
    return any(x > 1 and near(share * x, 1, 1e-4) for x in one.passes[0]["sums"])


def counted(passes: list[dict]) -> bool:
    """Return whether each pass's loss consists of sums, all divided by one number."""
    lists = [known(entry) for entry in passes]
    counts = [len(entry.get("terms", ())) for entry in passes]
    summed = all({x.kind for x in found} == {"sum"} for found in lists)
    if not summed or counts != [*map(len, lists)]:
        return False
    ratios = [[x.factor / (found[0].factor or 1) for x in found] for found in lists]
    return alike(ratios, 0.01)


def weights(one: Fit, number: int = 0) -> list[float]:
    """Return the weight of a term's targets in each pass, or [] if it is unknown."""
    found = []
    for share, entry in zip(one.shares, one.passes, strict=True):
        if len(terms := known(entry)) <= number:
            return []
        own = terms[number]
        rows = 1 if own.kind == "sum" else own.rows
        found.append(abs(share * own.factor) / (rows or 1))
    return found


def own_mean(column: tuple[Term, ...]) -> bool:
    """Return whether a loss is each pass's mean over its own number of targets."""
    seen = [x for x in column if x.rows and not x.weighted]
    each = [abs(x.factor) * (x.rows if x.kind == "sum" else 1) for x in seen]
    return not unequal(each, 1.01) and unequal([x.rows for x in seen])


def several(passes: list[dict], most: int) -> list[tuple[Term, ...]]:
    """Return each term of the losses in all passes, if fewer than `most` are known."""
    columns = [*zip(*map(known, passes), strict=False)]
    whole = all(len(x.get("terms", ())) == len(columns) < most for x in passes)
    same = all({x.kind for x in one} in ({"mean"}, {"sum"}) for one in columns)
    return columns if whole and same else []


def apart(row: list[Update]) -> bool:
    """Return whether a pass reaches less than half of the weights of another one."""
    counts = [
        sum(any(one.part(x, n)) for n in range(len(one.names)))
        for one in row
        for x in one.local
    ]
    return 2 * min(counts) < max(counts)


def unequal(values: list[float], most: float = 1.1) -> bool:
    """Return whether weights differ more than incomplete last batches can explain."""
    sizes = [*map(abs, values)]
    return bool(sizes) and max(sizes) > most * min(sizes)


@check(LAW, RISK, general=True, causes=EARLIER, read="lesson 3")
def mean_gradient(job):
    """A step's gradients are not the mean over the step's samples.

    Look for code that changes gradients between backward() and step().
    Not a mistake if: the change is intended.
    """
    rows, found = updates(job), fits(job)
    different = [row for row in rows if not alike(sums(row))]
    need(different, "the ranks' own gradients are equal, or were not seen")
    same = all(alike([one.used for one in row]) for row in rows)
    need(same, "the ranks use different gradients")
    need(found, "the gradients before they were clipped, or changed, were not seen")
    size, total = len(job.processes), len(found)
    place = found[0].row[0].passes[-1]["place"]
    uneven = [x for x in found if x.solved and unequal(x.shares)]
    uneven = [x for x in uneven if unequal(weights(x)) or not weights(x)]
    if len(uneven) > 0.2 * total:
        one, mend = uneven[0], ""
        told = ", ".join(f"{x:.2f}" for x in one.shares)
        what = f"in {len(uneven)} of {total} steps, the passes' weights differ: {told}"
        same = sum(alike([one.shares, x.shares], 0.05) for x in uneven)
        if same < max(2, len(uneven) / 2):
            scaled_down = all(0 < x * size < 1.01 for one in uneven for x in one.shares)
            need(scaled_down, f"{what}; in other steps, they differ")  # as in Adasum
            mend = "Average the gradients first, then clip the average."
        yield Breach(what, place, mend=mend)
        return
    lists = [[*x.ratios.values()] for x in found if not x.solved]
    strange = sum(sum(map(isnan, own)) > 0.2 * len(own) for own in lists)
    text = "the gradients used are not a multiple of the mean of the ranks' own"
    need(strange <= 0.2 * total, f"in {strange} of {total} steps, {text}")
    off = Counter(k for x in found for k, y in x.ratios.items() if not near(y, 1, 0.1))
    if off := [name for name, steps in off.items() if steps > total / 2]:
        lists = [[x.ratios.get(name, 0) for x in found] for name in off]
        # As when each weight is clipped alone, or frozen for an epoch
        scaled_down = all(max(x) > 1.02 * min(x) >= 0 or not any(x) for x in lists)
        text = "the script scales down or drops the gradients of some weights"
        need(not scaled_down, f"{text}: {listed(off)}")
        what = f"{len(off)} weights use another multiple of the mean: {listed(off)}"
        yield Breach(what, place)
        return
    right = [x for x in found if is_right(x)]
    ratio = median(x.factor for x in found)
    if len(right) < 0.8 * total:
        readable = [x for x in found if totals(x)]
        if len(readable) > total / 2 or not near(ratio, 1):
            yield Breach("", place, facts=found)
        raise NotJudged(unread(found))
    received = [x["received"] for row in rows for x in row[0].passes if "received" in x]
    text = "what backward() does with the tensors of other ranks is not seen"
    need(not received, f"{text}: {listed(received)}")
    wrong = sum(bool(totals(x)) and x not in right for x in found)
    need(not wrong, f"in {wrong} of {total} steps, samples have other weights")
    uneven = [any(unequal(weights(x, n)) for n in range(20)) for x in right]
    need(sum(uneven) <= len(right) / 5, "the losses' targets have different weights")
    terms = max(len(known(one.passes[0])) for one in right)
    text = "gradients are summed; perhaps a term of the loss does not depend on samples"
    need(near(ratio, 1) or terms < 2, text)
    text = f"in {len(right)} of {total} steps, the gradient is {ratio:#.4g} x the mean "
    text += f"of {size} ranks' own gradients"
    yield text + f", and their losses are divided by {ratio:g}" * (not near(ratio, 1))
    late_network(job)


def unread(found: list[Fit]) -> str:
    """Return why the samples' weights are unknown."""
    one, values = next(x for x in found if not is_right(x)), [x.factor for x in found]
    entry = one.passes[0]
    if not alike([[x] for x in values], 0.02):
        return f"the gradients are {min(values):.3f} to {max(values):.3f} x the mean"
    if terms := known(entry):
        each = listed(f"{x.factor:.4g} x a {x.kind.split()[-1]}" for x in terms)
        return f"the loss is made of {each}; doctor cannot know if you intend that"
    return f"how the loss at {entry['place']} averages its samples could not be read"


@check(LAW, RISK, causes=EARLIER)
def gathered_without_gradient(job):
    """The loss uses tensors from other ranks, and their gradients are lost.

    Use torch.distributed.nn.functional.all_gather(). If all ranks have the same loss,
    you can multiply it by the world size instead.
    Not a mistake if: the loss does not use the gathered tensors, or the learning rate
    accounts for the factor.
    """
    size, found = len(job.processes), fits(job)
    times = [any(near(value, size) for value in totals(x)) for x in found]
    if times and sum(times) > len(times) / 2:
        return  # the loss is multiplied by the world size
    rows = need(job.rows(Update), "no optimizer took a step")
    level = NOTE if rows[0][0].adaptive else RISK
    averaged = [x.row[0].passes for x in found if near(x.factor, 1)]
    lines = [entry["one_way"] for x in averaged for entry in x if "one_way" in entry]
    what = "a function calls {}(), but no collective in its backward()"
    name, place = lines[0] if 2 * len(lines) > sum(map(len, averaged)) else ("", "")
    if name == "all_reduce":  # not only a factor is lost
        mend = "In backward(), add up the gradients of all ranks with all_reduce()."
        yield Breach(what.format(name), place, mend=mend)
    elif lost := cut_off(job):
        what = "all_gather() gets a tensor with a gradient, but its results have none"
        yield Breach(what, lost[0])
    elif kept := cut_off(job, put_back=True):
        what = "of the tensors of all_gather(), only the rank's own has a gradient"
        yield Breach(what, kept[0], level=level)
    elif name:
        yield Breach(what.format(name), place, level=level)


@check(LAW, RISK, causes=[*EARLIER, mean_gradient], read="lesson 3")
def unequal_means(job):
    """The targets of a step have different weights.

    Sum the losses (reduction="sum"), multiply by the world size (because DDP averages),
    and divide by the all-reduced number (or class weights) of all passes' targets.
    Not a mistake if: each batch should have the same weight.
    """
    fitted, rank, seen = fits(job), job.processes[0], []
    counts = [len(x.indices or x.rows or ()) for x in rank.trained]
    counts = counts, [len(x.rows) for x in rank.of(Input)]
    most = min([20, *(mode(x) for x in counts if any(x))])  # a batch's samples
    for one in fitted:
        terms = [known(entry) for entry in one.passes]
        single = all(len(x) == 1 and x[0].kind in ("mean", "sum") for x in terms)
        if unequal(one.shares) or apart(one.row):
            continue
        if single or counted(one.passes):
            heavy = any(x[0].weighted for x in terms)  # class weights' sums differ
            differ = unequal(weights(one), 1.5 if heavy else 1.1)
            seen.append((one, differ, heavy, 0))
        elif columns := several(one.passes, most):
            own = [n for n, column in enumerate(columns) if own_mean(column)]
            seen.append((one, bool(own), False, min(own, default=0)))
    need(seen, "no losses with known numbers of targets were seen")
    found = [(one, *rest) for one, differ, *rest in seen if differ]
    rare = any(heavy for _, heavy, _ in found)  # a heavy class may be in few batches
    if len(found) > len(seen) * (0.2 if rare else 0.5):
        one, heavy, number = found[0]
        first = [known(entry)[number] for entry in one.passes[:4]]
        what, mean = "each loss is a mean over its own number of targets", True
        if heavy:
            what = "each loss is divided by the sum of its own targets' class weights"
        elif first[0].kind == "sum":
            what = "each rank divides its sum of losses by its own number"
            mean = own_mean(first)
        each = ", ".join(f"{x.rows if mean else 1 / abs(x.factor):.4g}" for x in first)
        text = f"in {len(found)} of {len(seen)} steps, {what} ({each} in step "
        yield Breach(f"{text}{one.row[0].step + 1})", one.row[0].passes[0]["place"])


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
        exponent = log2(usual) if usual > 0 else 0
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
            scales = [abs(x.factor) for x in terms if not near(abs(x.factor), size)]
            plain += {f"{x:.4g}" for x in scales if x > 0.99}
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
            f"is multiplied by {size} and not divided by {count}": size,
        }
        value = [*totals(one), 0.0][0] / count
        fits = [how for how, number in hows.items() if near(value, number, 0.002)]
        counts.update((how, count) for how in fits[:1])
    for (how, count), steps in counts.most_common(1):
        if steps >= 0.3 * len(found):
            passes = f"{count} passes, each with " * (count > 1)
            return Breach(f"a step has {passes}a mean loss that {how}")
    return None
