"""Law 5: a step uses the mean over all samples. Reads the autograd graphs of losses."""

import math
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate
from statistics import median
from traceback import walk_stack
from typing import NamedTuple

from ..law import RISK, Breach, check
from ..moments import Moments
from ..record import recorder, torch
from ..watcher import Watcher
from .passes import LAW, Passes, Update

MEANS = "Mean", "Nll", "Mse", "Binary", "Smooth", "L1", "Huber"
PASSED = "View", "Reshape", "Squeeze", "Unsqueeze", "ToCopy", "Alias", "Clone", "_DDP"
VECTORS = (
    *"""View Reshape Squeeze Unsqueeze ToCopy Clone Add Sub Neg Mul Div Where Index
    Select Slice Unbind Stack Cat Dot Vdot Mv Mm Bmm Permute Sum Mean""".split(),
)
RECEIVE = """all_gather all_gather_into_tensor all_gather_single all_to_all scatter
    all_to_all_single broadcast all_reduce reduce_scatter reduce_scatter_tensor
    allgather allreduce allreduce_ broadcast_""".split()
MOST = 20  # maximum number of terms of a loss


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
        self.sums, self.received, self.fresh = [], [], True
        self.validated = set()  # networks evaluated in this pass

    def on_input(self, network, inputs) -> None:
        key = id(next(network.parameters(), None))  # the same for a DDP model
        trains = torch.is_grad_enabled()
        # This is the pass's first network, or the network was just validated
        if self.fresh or (trains and key in self.validated):
            self.received, self.fresh, self.validated = [], False, set()
        self.validated |= set() if trains or network.training else {key}

    def on_collective(self, name, arguments, options, where) -> None:
        if not recorder.watching:
            return
        given = [*arguments[:2], *options.values()]
        flat = [y for x in given for y in (x if isinstance(x, list) else [x])]
        last = [x for x in flat if isinstance(x, torch.Tensor)][-1:]
        part = part_of_function(last)
        if part == "backward" and Passes.here.current:
            Passes.here.current.pop("one_way", None)
        for own in last if name in RECEIVE else ():
            # Many scripts gather a batch's losses (one dimension) to print them
            inside = part or (name == "all_reduce" and Moments.here.depth)
            if own.is_floating_point() and own.dim() > (not inside) and not in_torch():
                gathers = name.startswith("all_gather")
                tracks = gathers and own.requires_grad and torch.is_grad_enabled()
                sums = part == "sum" and name == "all_reduce" and own.numel() > 1
                inner = own.requires_grad and part if gathers else sums
                results = given[0] if gathers else []
                results = results if isinstance(results, (list, tuple)) else [results]
                one = results, tracks, name * bool(inner and own.is_cpu), where
                self.received = [*self.received[-15:], one]

    def after_collective(self, name, tensors, where, seconds) -> None:
        if name == "all_reduce" and recorder.watching:
            small = [one.detach().clone() for one in tensors if one.numel() <= 16]
            self.sums = [*self.sums, *small][-9:]

    def on_backward(self, root) -> None:
        received, self.received, self.fresh = self.received, [], True
        current = Passes.here.current
        if not recorder.watching or current is None:
            return
        for results, tracks, inner, where in received:
            current["received"] = where
            if inner:  # in an autograd function, until its backward() sends something
                current["one_way"] = inner, where
            own = [one.requires_grad for one in results]
            put_back = any(own) and (not inner if len(own) == 1 else not all(own))
            if put_back or (tracks and not any(own)):
                current["gathered"] = where, put_back
        if isinstance(root, torch.Tensor) and root.numel() == 1 and root.grad_fn:
            with root.device:
                current["terms"] = [*map(tuple, terms(root.grad_fn))][:MOST]
            current["outer"] = outer(root.grad_fn)
            sums = [x for one in self.sums for x in one.flatten().tolist()]
            current["sums"] = sums[-64:]

    def after_step(self, optimizer, weights) -> None:
        self.sums = []


def part_of_function(tensors: list) -> str:
    """Return "forward" or "backward" if an autograd function of the script runs.

    Return "sum" if, in forward(), a tensor seems to be a copy of the function's input.
    """
    part = ""
    for frame, _ in walk_stack(sys._getframe(2)):
        code, own = frame.f_code, frame.f_locals
        if code.co_name in ("forward", "backward") and code.co_argcount:
            first = own.get(code.co_varnames[0])
            if not isinstance(first, torch.autograd.function.BackwardCFunction):
                continue
            if code.co_name == "backward":
                return "backward"  # it may call another function
            inputs = [x for x in own.values() if torch.is_tensor(x) and x.requires_grad]
            lost = sum(first.needs_input_grad) > len(inputs)  # as in x = x.clone()
            pairs = [(x.to(y), y) for x in inputs for y in tensors if y.is_cpu]
            same = lost or any(torch.equal(x, y) for x, y in pairs)
            part = part or ("sum" if same else "forward")
    return part


def in_torch() -> bool:
    """Return whether a PyTorch layer, such as SyncBatchNorm, calls the collective."""
    files = (one.f_code.co_filename for one, _ in walk_stack(sys._getframe(1)))
    return any(one.endswith("torch/nn/modules/_functions.py") for one in files)


def children(node) -> list:
    """Return the nodes to which a node passes gradients."""
    return [x for x, _ in getattr(node, "next_functions", ()) if x is not None]


def terms(node, number=0, factor: float = 1.0, depth: int = 0) -> Iterator[Term]:
    """Yield the terms of a loss: the output of a node that has this number."""
    edges = [x for x in getattr(node, "next_functions", ()) if x[0] is not None]
    name = type(node).__name__
    added = name.startswith(("Add", "Sub", "Neg"))
    if depth > 30 or not edges:
        yield Term(factor, "")
    elif (value := multiple(node)) is not None:
        yield from terms(*edges[0], factor * value, depth + 1)
    elif not added and (found := elements(node, number, torch.ones(()), depth)):
        yield from (x._replace(factor=factor * x.factor) for x in found)
    elif name.startswith((*MEANS, "Sum")):
        yield averaged(node, factor)
    elif added or name.startswith(PASSED):
        for edge in edges:
            sign = -1 if name.startswith("Neg") else 1
            yield from terms(*edge, sign * factor, depth + 1)
    else:
        yield Term(factor, "")


def elements(node, number: int, given, depth: int) -> list[Term]:
    """Return the terms of a vector of stacked losses, given an output's gradient."""
    name, size = type(node).__name__, getattr(node, "_saved_self_sym_sizes", ())
    mask = mask_of(children(node)[0]) if name == "SumBackward1" else None
    binary = mask is not None and torch.equal(mask**2, mask * 1)
    few = max(math.prod(size) * (not binary), given.numel()) <= MOST
    own = isinstance(node, torch.autograd.function.BackwardCFunction)
    if own or not few or not name.startswith(VECTORS) or depth > 30:
        return []
    if binary and mask.shape == size and node._saved_dim == (0,):
        pairs = zip(given.tolist(), mask.count_nonzero(0).tolist(), strict=True)
        return [Term(x, "sum", count) for x, count in pairs]
    values, found, below = [given], [], node
    if name.startswith("Unbind"):
        while children(below) and not type(below).__name__.startswith(("Stack", "Cat")):
            below = children(below)[0]
        values = [given * (n == number) for n, _ in enumerate(children(below))]
    # The types of floating-point numbers may differ
    with suppress(RuntimeError, TypeError), torch.no_grad():
        results = node(*values)
        results = results if isinstance(results, tuple) else [results]
        for (one, own), value in zip(node.next_functions, results, strict=False):
            if one and name.startswith(("Stack", "Cat")) and value.numel() == 1:
                found.append([*terms(one, own, float(value), depth + 1)])
            elif one:
                found.append(elements(one, own, value, depth + 1))
    if any(found) and not all(found):  # such as learned weights
        return [Term(1.0, "")]
    single = name.startswith(("Select", "Unbind"))
    return [x for one in found for x in one if x.factor or not single]


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


def averaged(node, factor: float) -> Term:
    """Return the Term of a node that computes a mean or a sum."""
    name, inner = type(node).__name__, children(node)[0]
    kind = {1: "other mean", 2: "sum"}.get(getattr(node, "_saved_reduction", 1), "")
    if kind == "other mean" and name.startswith(("Nll", "Binary")):
        kind = "mean"
    if name.startswith("Nll"):
        target, each = node._saved_target, node._saved_weight
        target = target[target != node._saved_ignore_index]
        rows = target.numel() if each is None else float(each[target].sum())
        return Term(factor, kind, rows, weighted=each is not None)
    sums = name.startswith("Sum")
    known = hasattr(node, "_saved_self_sym_sizes")
    shape = node._saved_self_sym_sizes if known else node._saved_self.shape
    rows, count, width = (shape[0] if shape else 1), math.prod(shape), 1.0
    while (sums or name.startswith("Mean")) and (value := multiple(inner)) is not None:
        factor, inner = factor * value, children(inner)[0]
    if count == 1 and getattr(inner, "_saved_reduction", 0):
        return next(terms(inner, factor=factor))  # divided by a tensor of one element
    if sums:
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
    if before.startswith("SumBackward1"):
        width = math.prod(inner._saved_self_sym_sizes) / max(1, math.prod(shape))
    if before.startswith(MEANS):
        each = not getattr(inner, "_saved_reduction", 1)
        if sums and not each:
            kind = ""  # a sum of means
        if each and before.startswith("Nll") and inner._saved_target.numel() == count:
            used = inner._saved_target != inner._saved_ignore_index
            rows = count = int(used.sum())
    return Term(factor, kind, rows, count / max(1, rows), width)


def mask_of(node):
    """Return the factor without a gradient if a node is a product, else None."""
    if type(node).__name__ != "MulBackward0":
        return None
    (one, _), (other, _) = node.next_functions
    mask = node._saved_self if one is None else node._saved_other if not other else None
    return mask * 1 if mask is not None else None  # integers instead of booleans


def known(entry: dict) -> list[Term]:
    """Return the means and sums that make up a pass's loss, without the loss scale."""
    found = [Term(*one) for one in entry.get("terms", ())]
    scale = entry["scale"] or 1
    return [x._replace(factor=x.factor / scale) for x in found if x.kind]


def factors(entry: dict) -> list[float]:
    """Return possible factors of a pass's mean loss; a sum is a mean times its size."""
    if not (found := known(entry)):
        return []
    means = [x.factor * (x.rows if x.kind == "sum" else 1) for x in found]
    wide = [x.inner * mean for x, mean in zip(found, means, strict=True)]
    last = means[0] * found[0].each if found[0].kind == "sum" else means[0]
    return [means[0], sum(means), last, *accumulate(means), *accumulate(wide)]


def cut_off(job, put_back: bool = False) -> list[str]:
    """Return lines whose all_gather() gets a tensor with a gradient, and returns none.

    If `put_back`, the script replaces one of the results with its own tensor.
    """
    entries = [entry for one in job.of(Update) for entry in one.passes]
    found = [entry["gathered"] for entry in entries if entry.get("gathered")]
    return [place for place, own in found if own == put_back]


def by_share(one: Update) -> list[dict]:
    """Return a step's passes, or one combined pass if their gradients were summed."""
    if len(one.local) == len(one.passes):
        return one.passes
    first, count = one.passes[0], len(one.passes)
    terms = []
    for x in (Term(*one) for one in first.get("terms", ())):
        name = "rows" if x.kind == "sum" else "factor"
        terms.append(x._replace(**{name: count * getattr(x, name)}))
    return [first | {"terms": terms}]


@check(LAW, RISK, needs=[Update], read="lesson 3")
def factors_drift(job):
    """A factor in the loss, which the script changes on each rank, drifts apart.

    Before the script changes a factor, all_reduce() the numbers on which it depends.
    Not a mistake if: the ranks are meant to use different weights.
    """
    rows = [[one.passes for one in row] for row in job.rows(Update)]
    rows, gaps = [row for row in rows if {*map(len, row)} == {1}], []
    for row in ([known(passes[0]) for passes in row] for row in rows):
        same = len({tuple((x.kind, x.rows) for x in own) for own in row}) == 1
        sums = [sum(x.factor for x in own) for own in row]  # mixup's are equal
        if same and len(row[0]) > 1 and row[0][0].factor and max(sums) > min(sums):
            ratios = [[abs(x.factor / own[0].factor) for x in own] for own in row]
            pairs = [(max(x), min(x)) for x in zip(*ratios, strict=True)]
            gaps.append(max(most / (least or 1) - 1 for most, least in pairs))
        elif same:
            gaps.append(0.0)
    # Factors that are drawn at random differ in the first steps, too
    if len(gaps) > 15 and 4 * max(gaps[:2]) < median(gaps) > 0.01:
        what = f"the loss weights its parts by {median(gaps):.1%} differently on the "
        what += f"ranks, and at first by {gaps[0]:.1%}"
        yield Breach(what, rows[0][0][0]["place"])
