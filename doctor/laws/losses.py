"""Law 5: a step uses the mean over all samples. Reads the autograd graphs of losses."""

import math
import sys
from collections.abc import Iterator
from itertools import accumulate
from traceback import walk_stack
from typing import NamedTuple

from ..record import recorder, torch
from ..watcher import Watcher
from .passes import Passes, Update

MEANS = "Mean", "Nll", "Mse", "Binary", "Smooth", "L1", "Huber"
PASSED = "View", "Reshape", "Squeeze", "Unsqueeze", "ToCopy", "Alias", "Clone", "_DDP"
RECEIVE = """all_gather all_gather_into_tensor all_gather_single all_to_all scatter
    all_to_all_single broadcast all_reduce reduce_scatter reduce_scatter_tensor
    allgather allreduce allreduce_ broadcast_""".split()
NODES = 2000  # maximum number of nodes to read in a graph
FIRST = 4  # number of steps whose graphs doctor searches for the user's functions


class Term(NamedTuple):
    """A term of a loss: a factor times a mean or a sum."""

    factor: float
    kind: str  # mean, other mean (often half the mean of squares), sum, or "": unknown
    rows: float = 0  # number of targets, or the reduced tensor's first dimension
    each: float = 1  # numbers per row
    inner: float = 1  # how many values are summed in each of these numbers
    weighted: bool = False  # rows is the sum of the targets' class weights


class Losses(Watcher):
    """Reads from each loss's graph how the script sums and divides the loss."""

    def __init__(self):
        self.sums, self.received, self.printed = [], [], False
        self.backing, self.fresh = False, True
        self.validated = set()  # networks evaluated in this pass

    def on_input(self, network, inputs) -> None:
        key = id(next(network.parameters(), None))  # the same for a DDP model
        trains = torch.is_grad_enabled()
        # This is the pass's first network, or the network was just validated
        if self.fresh or (trains and key in self.validated):
            self.received, self.fresh, self.printed = [], False, False
            self.validated = set()
        self.validated |= set() if trains or network.training else {key}

    def on_collective(self, name, arguments, options, where) -> None:
        current = Passes.here.current
        if self.backing and current is not None:
            current["meets"] = True
        if not recorder.watching or name not in RECEIVE or not arguments:
            return
        given = [*arguments[:2], *options.values()]
        flat = [y for x in given for y in (x if isinstance(x, list) else [x])]
        own = [x for x in flat if isinstance(x, torch.Tensor)][-1:]
        if own and own[0].numel() == 1:  # perhaps the loss, for printing
            self.printed = True
        # Many scripts gather a batch's losses (one dimension) to print them
        if own and own[0].is_floating_point() and own[0].dim() > 1 and not in_torch():
            tracks = own[0].requires_grad and torch.is_grad_enabled()
            gathers = name.startswith("all_gather")
            entry = given[0] if gathers else [], tracks and gathers, where
            self.received = [*self.received[-15:], entry]

    def after_collective(self, name, tensors, where, seconds) -> None:
        small = [one for one in tensors if one.numel() <= 16]
        if name == "all_reduce" and small and recorder.watching:
            self.sums = [*self.sums[-8:], *(one.detach().clone() for one in small)]

    def on_backward(self, root) -> None:
        received, printed = self.received, self.printed
        self.received, self.printed = [], False
        current, self.fresh = Passes.here.current, True
        self.backing = True
        if not recorder.watching or current is None:
            return
        for results, tracks, where in received:
            current["received"] = where
            results = results if isinstance(results, (list, tuple)) else [results]
            own = [one.requires_grad for one in results]
            put_back = any(own) and (len(own) == 1 or not all(own))
            if put_back or (tracks and not any(own)):
                current["gathered"] = where, put_back
        if isinstance(root, torch.Tensor) and root.numel() == 1 and root.grad_fn:
            current["value"] = 0 if printed else root.detach()
            current["terms"] = [*map(tuple, terms(root.grad_fn))][:20]
            current["outer"] = outer(root.grad_fn)
            sums = [x for one in self.sums for x in one.flatten().tolist()]
            current["sums"] = sums[-64:]
            if recorder.step < FIRST:
                current["own"] = has_own_function(root.grad_fn)

    def after_backward(self) -> None:
        self.backing = False

    def after_step(self, optimizer, weights) -> None:
        self.sums = []


def in_torch() -> bool:
    """Return whether a PyTorch layer, such as SyncBatchNorm, calls the collective."""
    files = (one.f_code.co_filename for one, _ in walk_stack(sys._getframe(1)))
    return any(one.endswith("torch/nn/modules/_functions.py") for one in files)


def has_own_function(root) -> bool:
    """Return whether a graph has the user's own functions, which may communicate."""
    seen, waiting = {root}, [root]
    while waiting and len(seen) < NODES:
        node = waiting.pop()
        own = isinstance(node, torch.autograd.function.BackwardCFunction)
        if own and not type(node).__name__.startswith("_DDP"):
            return True
        new = {x for x, _ in node.next_functions if x is not None} - seen
        seen |= new
        waiting += new
    return bool(waiting)


def children(node) -> list:
    """Return the nodes to which a node passes gradients."""
    return [x for x, _ in getattr(node, "next_functions", ()) if x is not None]


def terms(node, factor: float = 1.0, depth: int = 0) -> Iterator[Term]:
    """Yield the terms of a loss."""
    name, inner = type(node).__name__, children(node)
    if depth > 30 or not inner:
        yield Term(factor, "")
    elif name.startswith((*MEANS, "Sum")):
        first, shape = type(inner[0]).__name__, sizes(node)
        if first.startswith(("Stack", "Cat")) and shape == (len(children(inner[0])),):
            own = factor / shape[0] if name.startswith("Mean") else factor
            yield from terms(inner[0], own, depth + 1)
        else:
            yield averaged(node, name, factor, shape, inner[0])
    elif (value := multiple(node)) is not None:
        yield from terms(inner[0], factor * value, depth + 1)
    elif name.startswith(("Add", "Sub", "Neg", "Stack", "Cat", *PASSED)):
        for one in inner:
            sign = -1 if name.startswith("Neg") else 1
            yield from terms(one, sign * factor, depth + 1)
    else:
        yield Term(factor, "")


def multiple(node) -> float | None:
    """Return the constant by which a node multiplies, or None."""
    name = type(node).__name__
    if not name.startswith(("DivBackward", "MulBackward")):
        return None
    first = node.next_functions[0][0] is not None
    other = node._saved_other if first or name[0] == "D" else node._saved_self
    if other is None or getattr(other, "numel", lambda: 1)() != 1:
        return None
    value = float(other)
    return (1 / value if value else 0) if name[0] == "D" else value


def outer(node) -> list[float]:
    """Return the last constants by which the whole loss was multiplied."""
    found = []
    while len(found) < 3 and (value := multiple(node)) is not None:
        found.append(value)
        node = children(node)[0]
    return found


def stacked(node, count: int, depth: int = 0) -> bool:
    """Return whether a node's numbers are computed elementwise from stacked losses."""
    name, inner = type(node).__name__, children(node)
    if name.startswith(("Stack", "Cat")):
        return len(inner) == count
    single = name.startswith((*PASSED, "Add", "Sub", "Mul", "Div", "Exp", "Neg", "Pow"))
    return single and depth < 9 and any(stacked(x, count, depth + 1) for x in inner)


def sizes(node) -> tuple[int, ...]:
    """Return the shape of the tensor that a node averages or sums."""
    shape = getattr(node, "_saved_self_sym_sizes", None)
    return tuple(shape if shape is not None else node._saved_self.shape)


def averaged(node, name: str, factor: float, shape: tuple, inner) -> Term:
    """Return the Term of a node that computes a mean or a sum."""
    kind = {1: "other mean", 2: "sum"}.get(getattr(node, "_saved_reduction", 1), "")
    if name.startswith("Nll"):
        target, each = node._saved_target, node._saved_weight
        target = target[target != node._saved_ignore_index]
        rows = target.numel() if each is None else float(each[target].sum())
        kind = "mean" if kind == "other mean" else kind
        return Term(factor, kind, rows, weighted=each is not None)
    rows, count = (shape[0] if shape else 1), math.prod(shape)
    if name.startswith("Binary") and kind == "other mean":
        kind = "mean"
    while name.startswith(("Mean", "Sum")) and (value := multiple(inner)) is not None:
        factor, inner = factor * value, children(inner)[0]
    if name.startswith("Sum"):
        mask, kind = mask_of(inner), "sum"
        if mask is not None and mask.numel() == count:
            ones, top = int(mask.count_nonzero()), float(mask.max())
            gaps = (mask - top).abs()[mask != 0]
            if ones and float(gaps.max()) <= 1e-6 * abs(top):
                factor, rows, count = factor * top, ones, ones
            elif float(mask.min()) >= 0 and top < 1:
                kind = ""  # each term may have its own divisor
    while type(inner).__name__.startswith(("Neg", "MaskedFill", *PASSED)):
        inner = children(inner)[0]
    before = type(inner).__name__
    width = 1.0
    if before.startswith("SumBackward1"):
        width = math.prod(sizes(inner)) / max(1, math.prod(shape))
    each = before.startswith(MEANS) and not getattr(inner, "_saved_reduction", 1)
    if before.startswith(MEANS) and name.startswith("Sum") and not each:
        kind = ""  # a sum of means
    if each and before.startswith("Nll") and inner._saved_target.numel() == count:
        target = inner._saved_target
        rows = count = int((target != inner._saved_ignore_index).sum())
    if len(shape) == 1 and stacked(inner, rows):
        kind = ""  # several losses with individual weights
    return Term(factor, kind, rows, count / max(1, rows), width)


def mask_of(node):
    """Return the factor without a gradient if a node is a product, else None."""
    if type(node).__name__ != "MulBackward0":
        return None
    (one, _), (other, _) = node.next_functions
    return node._saved_self if one is None else node._saved_other if not other else None


# --- what is read ---


def known(entry: dict) -> list[Term]:
    """Return the means and sums that make up a pass's loss, without the loss scale."""
    found = [Term(*one) for one in entry.get("terms", ())]
    scale = entry["scale"] or 1
    return [x._replace(factor=x.factor / scale) for x in found if x.kind]


def factors(entry: dict) -> list[float]:
    """Return the possible factors of a pass's mean loss, or [] if they are unknown.

    These are the factors of the first term, of the first few terms together, and of all
    terms together. A sum counts as a mean times the number of summands.
    """
    if not (found := known(entry)):
        return []
    means = [x.factor * (x.rows if x.kind == "sum" else 1) for x in found]
    wide = [x.inner * mean for x, mean in zip(found, means, strict=True)]
    last = means[0] * found[0].each if found[0].kind == "sum" else means[0]
    return [means[0], sum(means), last, *accumulate(means), *accumulate(wide)]


def by_share(one: Update) -> list[dict]:
    """Return a step's passes, or one combined pass if their gradients were summed."""
    if len(one.local) == len(one.passes):
        return one.passes
    first, count = one.passes[0], len(one.passes)
    terms = [(factor * count, *rest) for factor, *rest in first.get("terms", ())]
    return [first | {"terms": terms}]
