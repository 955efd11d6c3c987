"""Record networks' inputs, and infer the samples of loops without a DataLoader."""

import sys
from array import array
from collections import Counter
from dataclasses import field
from itertools import chain, combinations, pairwise
from operator import ne

from .event import Event
from .job import Job
from .law import need
from .loaders import Loaders, leaves
from .moments import Moments
from .objects import indices
from .record import recorder, torch
from .sample import digest, hashes, numbers, rows_of
from .watcher import Watcher


class Input(Event, limit=5000):
    """A network was called while gradients were enabled."""

    network: int
    rows: array  # a hash of each entry of the largest tensor, or of all single integers
    loaded: bool  # the last batch came from a DataLoader
    indices: array | None = None  # perhaps the samples' indices, in a variable
    # position -> a hash of another input with as many entries, whether these differ,
    # and whether each entry consists of several numbers
    arguments: dict[int, tuple[int, bool, bool]] = field(default_factory=dict)
    place: str = ""
    carries: bool = False  # one of the inputs is an earlier output, such as a state


class Targets(Event, limit=400):
    """A loss function was called with one target per sample."""

    count: int
    values: array  # targets of the first 64 samples


class Inputs(Watcher):
    """Records the inputs of networks in training."""

    def __init__(self):
        self.networks = {}
        self.outputs = []  # a few numbers of the last outputs, except the first one

    def on_output(self, network, outputs, batch) -> None:
        others = leaves(outputs)[1:3] if recorder.watching else ()
        self.outputs = [x for x in numbers([*others], 4) if any(x)]

    def on_input(self, network, inputs) -> None:
        if recorder.full(Input) or not recorder.watching or not torch.is_grad_enabled():
            return
        if any(one.grad_fn for one in inputs):
            return  # another network's outputs, as in a loss, are not samples
        if inputs := [one for one in inputs if one.dim() and len(one)]:
            largest = max(inputs, key=torch.Tensor.numel)
            loaded = Loaders.here.current is not None
            one = Input(
                network=self.networks.setdefault(id(network), len(self.networks)),
                rows=rows_of(inputs),
                loaded=loaded,
                indices=None if loaded else indices(sys._getframe(), len(largest)),
                arguments=arguments(inputs, largest),
                place=Moments.here.where,
            )
            if self.outputs and len(inputs) > 1:
                one.carries = any(x in self.outputs for x in numbers(inputs[1:4], 4))
            recorder.write(one)


def arguments(inputs: list, largest) -> dict[int, tuple[int, bool, bool]]:
    """Return Input.arguments."""
    found = {}
    for number, one in enumerate(inputs, 1):
        if one is not largest and len(one) == len(largest) > 7 and one.dim() < 3:
            rows = hashes(one)
            distinct = len({*rows}) > 0.8 * len(rows)
            found[number] = digest(rows), distinct, one.dim() > 1
    return found


def inputs(job: Job) -> list[list[Input]]:
    """Return one network's first input in each step, for each rank."""
    every = need(job.of(Input), "no input was seen")
    # The first network whose inputs differ between the ranks, if there is one
    for number in sorted({one.network for one in every}):
        ranks = []
        for process in job.processes:
            own = [one for one in process.of(Input) if one.network == number]
            ranks.append([*{one.step: one for one in reversed(own)}.values()][::-1])
        if all(ranks) and not same_rows(ranks):
            break
    return ranks


def takes_parts(job: Job) -> bool:
    """Return whether a rank's inputs are parts of its batches, and no other rank's."""
    own = job.processes[0].trained
    size = max((len(one.indices or one.rows or ()) for one in own), default=0)
    steps = {}
    for one in job.of(Input):
        steps.setdefault(one.step, []).extend(one.rows)
    parts = [rows for rows in steps.values() if len({*rows}) == len(rows) <= size]
    return len(parts) > 0.9 * len(steps)


def contents(job: Job) -> list[list[array]]:
    """Return what identifies the samples in each rank's steps.

    If a variable holds indices, and an index has the same contents (or, if these
    change at random, the same target) in all steps and ranks, return these indices.
    """
    lists = inputs(job)
    rows = [[one.rows for one in own] for own in lists]
    names = [[one.indices for one in own] for own in lists]
    if not all(map(all, names)):
        return rows
    labels = []
    for process, own in zip(job.processes, lists, strict=True):
        known = {one.step: one.values for one in reversed(process.of(Targets))}
        labels.append([known.get(one.step, ()) for one in own])
    if all(map(agree, names, rows)):  # augmentation does not change the contents
        labels = rows
    return names if agree(sum(names, []), sum(labels, [])) else rows


def agree(names: list[array], marks: list) -> bool:
    """Return whether equal names have equal marks, too irregular for chance."""
    found, again = {}, Counter()
    for name, mark in chain(*map(zip, names, marks)):
        again[found.setdefault(name, mark) == mark] += 1
    values = [found[name] for name in sorted(found)]
    again[True] -= len(found)
    irregular = len({*values}) > len(values) / 2 or tells(values)
    return again[True] >= 30 and again[False] < 0.01 * again[True] and irregular


def tells(values: list[float]) -> bool:
    """Return whether numbers are too irregular to recur in the same order by chance."""
    changes = [(one, other) for one, other in pairwise(values) if one != other]
    counts = len({*values}), len(changes), len({*pairwise(values)})
    return len(values) >= 64 and min(counts[1:]) > 1.3 * counts[0]


def before_a_repeat(batches: list) -> list:
    """Return the batches before the first batch that repeats a sample."""
    seen = set()
    for number, rows in enumerate(batches):
        if seen & {*rows}:
            return batches[:number]
        seen |= {*rows}
    return batches


def same_rows(ranks: list[list[Input]]) -> bool:
    """Return whether two ranks have equal inputs."""
    for one, other in combinations(ranks[:8], 2):
        pairs = [*zip(one, other, strict=False)]
        same = [tuple(a.rows) for a, b in pairs if a.rows == b.rows]
        changes = len({*same}) > max(2, 0.9 * len(same))
        if len(same) >= 0.9 * len(pairs) and changes:
            return True
    return False


def other_targets(job: Job) -> bool:
    """Return whether two ranks' targets, or smaller inputs, differ in most steps.

    Inputs of one number per sample, such as times in diffusion, do not count.
    """
    targets = [[sorted(one.values) for one in row] for row in job.rows(Targets)]
    others = [[wide(one) for one in row] for row in job.rows(Input)]
    counts = [sum(any(map(ne, x, x[1:])) for x in rows) for rows in (targets, others)]
    return counts[0] > len(targets) / 2 or counts[1] > len(others) / 2


def wide(one: Input) -> list[int]:
    """Return the hashes of smaller inputs that have several numbers per sample."""
    return [first for first, *more in one.arguments.values() if more[1:] == [True]]
