"""Law 5: a step is the mean over all samples. Losses, and passes of one step."""

from collections import Counter
from collections.abc import Iterator
from statistics import median

from ..law import NOTE, RISK, Breach, NotJudged, check, need
from ..record import recorder, wrap
from ..watcher import Watcher
from .accumulation import leaked_passes
from .gradient import (
    clip_order,
    near,
    not_averaged,
    not_awaited,
    not_cleared,
    ratio,
    summed,
    updates,
)
from .passes import LAW, Passes, Update
from .replicas import alike, weights_differ

LOSSES = "cross_entropy nll_loss mse_loss binary_cross_entropy_with_logits".split()
MEANS = "Mean", "Nll", "Mse", "Binary", "Smooth", "L1", "Huber"
PASSED = "View", "Reshape", "Squeeze", "Unsqueeze", "ToCopy", "Alias", "Clone"


class Losses(Watcher):
    """Reads from the graph of each loss how it is summed and divided."""

    def __init__(self):
        self.count, self.flat, self.sums, self.gathered = None, True, [], []

    def hooks(self) -> None:
        from torch.nn import functional

        for name in LOSSES:
            wrap(functional, name, self.loss)

    def loss(self, call, /, *args, **kwargs):
        import torch

        result = call(*args, **kwargs)
        if not recorder.watching or not torch.is_grad_enabled():
            return result
        if isinstance(result, torch.Tensor) and kwargs.get("weight") is None:
            target = kwargs["target"] if "target" in kwargs else args[1]
            self.count = len(target) if target.dim() else 1  # the loss is their mean
            if target.is_floating_point() and target.dim() > 1:
                self.flat = False  # a sum has more terms than samples
            if not target.is_floating_point():
                self.count = (target != kwargs.get("ignore_index", -100)).sum()
        return result

    def on_collective(self, name, tensors, options, where) -> None:
        import torch

        if name.startswith("all_gather") and torch.is_grad_enabled():
            own = [one for one in tensors if isinstance(one, torch.Tensor)]
            # One dimension: losses of a batch, which many scripts gather to print
            if recorder.watching and any(x.requires_grad and x.dim() > 1 for x in own):
                self.gathered.append((tensors[0], where))

    def after_collective(self, name, tensors, where, seconds) -> None:
        small = [one for one in tensors if one.numel() <= 16]
        if name == "all_reduce" and small and recorder.watching:
            self.sums = [*self.sums[-8:], *(one.detach().clone() for one in small)]

    def on_batch(self, epoch, batch, seconds) -> None:
        self.gathered = []

    def on_backward(self, root) -> None:
        import torch

        current, counted = Passes.here.current, self.count
        gathered, self.gathered, self.count = self.gathered, [], None
        if not recorder.watching or current is None:
            return
        for results, where in gathered:
            results = results if isinstance(results, (list, tuple)) else [results]
            if not any(one.requires_grad for one in results):
                current["gathered"] = where
        if isinstance(root, torch.Tensor) and root.numel() == 1 and root.grad_fn:
            found = [*terms(root.grad_fn, 1.0)][:20]
            current["terms"] = found
            current["count"] = None if counted is None else int(counted)
            current["flat"], self.flat = self.flat, True
            if len(found) == 1 and found[0][1] == "sum":
                sums = [x for one in self.sums for x in one.flatten().tolist()]
                same = [
                    x for x in sums if x > 1 and near(abs(found[0][0]) * x, 1, 1e-4)
                ]
                current["reduced"] = same[0] if same else None

    def after_step(self, optimizer, weights) -> None:
        self.sums = []


def terms(node, factor: float, depth: int = 0) -> Iterator[tuple[float, str]]:
    """Yield the terms of a loss: factors, and "mean", "other mean", "sum" or "".

    Half of a mean of squares is as usual as the mean; half of a cross-entropy is not.
    """
    name, inner = (
        type(node).__name__,
        [x for x, _ in getattr(node, "next_functions", ())],
    )
    inner = [one for one in inner if one is not None]
    if depth > 30 or not inner:
        yield factor, ""
    elif name.startswith(MEANS):
        kind = getattr(node, "_saved_reduction", 1)
        mean = "mean" if name.startswith(("Nll", "Binary")) else "other mean"
        yield factor, {1: mean, 2: "sum"}.get(kind, "")
    elif name.startswith("Sum"):
        first = type(inner[0]).__name__
        if first.startswith(("Stack", "Cat")):
            yield from terms(inner[0], factor, depth + 1)
        else:
            yield factor, "" if first.startswith("Mean") else "sum"
    elif name in ("DivBackward0", "MulBackward0"):
        other = node._saved_other
        if other is None or other.numel() != 1:
            yield factor, ""
        else:
            value = other.item()
            value = (1 / value if value else 0) if name[0] == "D" else value
            yield from terms(inner[0], factor * value, depth + 1)
    elif name.startswith(("Add", "Sub", "Neg", "Stack", "Cat", *PASSED)):
        for one in inner:
            sign = -1 if name.startswith("Neg") else 1
            yield from terms(one, sign * factor, depth + 1)
    else:
        yield factor, ""


# --- checks ---


def one_mean(row: list[Update]) -> float | None:
    """Return a step's factor if all its passes are means with one factor, or None."""
    found = [x.get("terms") or [(1.0, "")] for one in row for x in one.passes]
    places = {x["place"] for one in row for x in one.passes}
    if len(places) > 1 or any(len(x) > 1 or "mean" not in x[0][1] for x in found):
        return None
    values = [x[0][0] / (row[0].passes[0]["scale"] or 1) for x in found]
    return values[0] if alike([[x] for x in values], 1e-3) else None


def hypotheses(count: int, size: int) -> dict[str, float]:
    """Return the known factors of a mean loss in a step with `count` passes."""
    return {
        "": 1 / count,
        f"is not divided by {count}": 1,
        f"is divided by {count} twice": 1 / count**2,
        f"is divided by {size}, the world size": 1 / count / size,
        f"is multiplied by {size}, the world size": size / count,
    }


@check(
    LAW,
    RISK,
    causes=[weights_differ, summed, leaked_passes],
    read="tutorial/07_accumulation/README.md",
)
def loss_scale(job):
    """The loss is divided by another number than the number of passes per step.

    With n micro-batches, divide each one's mean loss by n. DDP averages over ranks.
    Not a mistake if: the learning rate accounts for it, or the factor is intended.
    """
    found, unknown, size = Counter(), Counter(), max(1, job.world_size)
    rows = [row for row in job.rows(Update) if row[0].passes]
    for row in rows:
        passes, value = row[0].passes, one_mean(row)
        if value is None:
            continue
        count, known = len(passes), hypotheses(len(passes), size)
        how = next((k for k, x in known.items() if near(value, x, 0.002)), None)
        if how and count == 1 and passes[0]["terms"][0][1] == "other mean":
            how = None
        what = f"a step has {count} passes, each with a mean loss that "
        what = what if count > 1 else "a step has a mean loss that "
        found[what + how if how else how, passes[0]["place"]] += 1
        if how is None:
            unknown[f"{what}is multiplied by {value:.4g}", passes[0]["place"]] += 1
    need(found, "no mean loss was seen")
    total = sum(found.values())
    for (what, place), steps in found.items():
        if what and steps >= 0.3 * total:
            yield Breach(what, place)
    for (what, place), steps in unknown.items():
        if steps >= 0.3 * total:
            yield Breach(what, place, level=NOTE)


@check(
    LAW, RISK, causes=[summed, loss_scale], read="tutorial/07_accumulation/README.md"
)
def summed_loss(job):
    """The loss is a sum over samples, and DDP averages the ranks' gradients.

    Multiply the loss by the world size, or divide the sum by the number of samples (or
    targets) of all ranks: otherwise N processes with batches of B do not make the step
    of one process with a batch of N x B.
    Not a mistake if: the learning rate accounts for it.
    """
    rows = [row for row in updates(job) if near(ratio(row)[0], 1)]
    need(rows, "no step with averaged gradients was seen")
    tied = [row for row in rows if row[0].passes[-1].get("reduced")]
    if len(tied) > len(rows) / 2:
        one, size = tied[0][0], len(job.processes)
        what = "the loss is divided by a sum over all ranks "
        what += f"({one.passes[-1]['reduced']:g} in step {one.step + 1}), and averaged "
        mend = f"Multiply the loss by {size}, the world size."
        yield Breach(
            f"{what}over {size} ranks again", one.passes[-1]["place"], mend=mend
        )
        return
    if found := summed_rows(rows):
        ends = [x.passes[-1] for row in found for x in row]
        counts = {one.get("count") if one.get("flat") else None for one in ends}
        constant = len(counts) == 1 and None not in counts  # only a factor
        what = (
            "the loss is a sum over the samples of a rank's batch, and the gradients "
        )
        what += f"are divided by {len(job.processes)}, the number of processes"
        yield Breach(what, ends[0]["place"], level=NOTE if constant else RISK)


def summed_rows(rows: list[list[Update]]) -> list[list[Update]]:
    """Return the steps whose losses are sums that nothing divides, if most are."""
    found = []
    for row in rows:
        own = row[0].passes[-1]
        values = [abs(x) / (own["scale"] or 1) for x, _ in own.get("terms", ())]
        if {kind for _, kind in own.get("terms", ())} == {"sum"} and max(values) > 0.99:
            found.append(row)
    return found if len(found) > len(rows) / 2 else []


@check(LAW, RISK, read="tutorial/08_collectives/README.md")
def gathered_without_gradient(job):
    """Training gathers tensors from all ranks, and their gradients are lost.

    Use torch.distributed.nn.functional.all_gather(), or put each rank's own tensor back
    into its list.
    Not a mistake if: the loss does not use the result, or each rank's tensor is put
    back later.
    """
    for one in need(job.of(Update), "no optimizer took a step"):
        if found := [x["gathered"] for x in one.passes if x.get("gathered")]:
            what = (
                f"in step {one.step + 1}, all_gather() gets a tensor with a gradient, "
            )
            yield Breach(f"{what}and returns tensors without one", found[0])
            return


@check(
    LAW,
    NOTE,
    general=True,
    causes=[not_averaged, not_awaited, summed, clip_order, not_cleared, weights_differ],
)
def mean_gradient(job):
    """The gradients of a step are not the mean of the ranks' own gradients.

    Look for code that changes gradients between backward() and step().
    """
    rows = updates(job)
    if all(alike([one.local for one in row]) for row in rows):
        raise NotJudged("the ranks' own gradients are equal, or were not seen")
    if not all(alike([one.used for one in row]) for row in rows):
        raise NotJudged("the ranks use different gradients")
    if summed_rows(rows):
        raise NotJudged("the loss is a sum over the samples of a rank's batch")
    pairs = [ratio(row) for row in rows]
    pairs = [(value, off) for value, off in pairs if value == value]
    need(pairs, "the ranks' own gradients are zero")
    right = [1 for value, off in pairs if near(value, 1) and off <= 0.2]
    value = median(value for value, _ in pairs)
    if len(right) < 0.8 * len(pairs):
        off = sum(off > 0.2 for _, off in pairs)
        if off > 0.2 * len(pairs):
            what = (
                f"in {off} of {len(pairs)} steps, the used gradients are no multiple "
            )
            yield Breach(f"{what}of the mean of the ranks' own", rows[0][0].place)
        raise NotJudged(
            f"the used gradients are {value:.3f} x the mean of the ranks' own ones"
        )
    factors = [one_mean(row) for row in rows]
    known = [1 / len(row[0].passes) for row in rows]
    pairs_of = [(x, y) for x, y in zip(factors, known, strict=True) if x is not None]
    strange = [(x, y) for x, y in pairs_of if not near(x, y, 0.002)]
    if len(strange) >= 0.3 * max(1, len(pairs_of)):
        one, other = strange[0]
        count = round(1 / other)
        text = f"the loss has a factor of {one:.4g} in each of {count} passes"
        raise NotJudged(text)
    yield (
        f"in {len(right)} of {len(pairs)} steps, the gradient is {value:.3f} x the "
        f"mean of {len(rows[0])} ranks' own gradients"
    )
