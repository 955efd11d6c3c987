"""Law 2: ranks are exchangeable. Compares the ranks' settings."""

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import groupby

from ..event import Event
from ..law import RISK, Breach, check, need
from ..moments import Step
from ..objects import BLOCKS, is_users
from ..reads import Feed
from ..record import recorder
from ..sample import digest
from ..watcher import Watcher
from .ranks import LAW, Facts
from .replicas import alike
from .samples import datasets_differ, undivided


class Fitted(Event, limit=1):
    """What objects have learned from data, such as StandardScaler.mean_."""

    values: dict[str, list[float]]  # a few numbers, by class and attribute


class Settings(Watcher):
    """Records what scikit-learn's objects and the script's own ones have learned."""

    def on_step(self, optimizer, weights, gradients) -> None:
        if not recorder.full(Fitted) and sys.getallocatedblocks() < BLOCKS:
            recorder.write(Fitted(values=fitted()))


def fitted() -> dict[str, list[float]]:
    """Return Fitted.values; by scikit-learn's convention, such names end with _."""
    every, found, again = gc.get_objects(), {}, set()
    kinds = {one for one in {*map(type, every)} if is_users(one)}
    for one in every:
        kind = type(one)
        if kind in kinds or str(kind.__module__).startswith("sklearn."):
            for name, value in [*getattr(one, "__dict__", {}).items()]:
                label = f"{kind.__name__}.{name}"
                if name.endswith("_") and name[0] != "_" and (few := few_of(value)):
                    again |= {label} & found.keys()
                    found[label] = few
    return {name: few for name, few in found.items() if name not in again}


def few_of(value) -> list[float]:
    """Return a few numbers of an array, a table, a dictionary of these, or a number."""
    if isinstance(value, (int, float)):
        return [float(value)]
    if isinstance(value, dict):
        return [x for one in [*value.values()][:8] for x in few_of(one)]
    value = value.to_numpy() if hasattr(value, "to_numpy") else value
    if type(value).__name__ != "ndarray":
        return []
    few = value.ravel()[:8].tolist()
    numbers = all(isinstance(x, (int, float)) for x in few)
    return [float(x) for x in few] if numbers else [float(digest(*map(str, few)))]


@check(LAW, RISK, general=True, causes=[datasets_differ])
def settings_differ(job):
    """The ranks train with different settings.

    Use one setting on all ranks; after an evaluation on one rank, call train() there.
    Not a mistake if: the ranks are meant to differ, for example in their batch sizes.
    """
    undivided(job)
    trains = all(process.of(Facts) for process in job.processes)
    need(trains, "some ranks make no training pass")
    count, differ = Counter(), {}
    for name, row, step, place in facts(job):
        count[name] += 1
        if len({*row}) > 1:
            differ.setdefault(name, []).append((row, step, place))
    need(count, "no training pass was seen on all ranks")
    for name in sorted(differ, key=lambda name: -len(differ[name]))[:3]:
        number, (row, step, place) = len(differ[name]), differ[name][0]
        if number > max(2, 0.1 * count[name]):
            told = ", ".join(f"{x} on rank {n}" for n, x in enumerate(row[:4]))
            what = f"{name}: {told} in step {step + 1} and others ({number} passes)"
            yield Breach(what, place)
    for what in changed(job):
        yield Breach(what, job.processes[0].loader().place)
    names = ", ".join(name for name in count if " of " not in name)
    yield f"equal on all ranks in {max(count.values())} passes: {names}"


def changed(job) -> Iterator[str]:
    """Yield a message if a number of the training dataset changes on some ranks only.

    A whole number that grows may be a counter.
    """
    lists = []
    for process in job.processes:
        feeds = {x.epoch: x for x in process.of(Feed) if x.loader == process.training}
        lists.append([feeds[x].fields for x in process.epochs if x in feeds])
    known = [{*fields} for own in lists for fields in own]
    for name in sorted(set.intersection(*known)) if all(lists) else ():
        rows = [[x[name] for x in own] for own in lists]
        kinds = [[value for value, _ in groupby(row)] for row in rows]
        grow = any(isinstance(x[-1], int) and x[-1] > x[0] for x in rows)
        once = sorted({*map(len, kinds)}) == [1, 2]
        if once and len({x[0] for x in rows}) == 1 and not grow:
            told = ", ".join(f"{x[-1]} on rank {n}" for n, x in enumerate(rows[:4]))
            yield f"{name} is {rows[0][0]} on every rank at first, and later {told}"


def facts(job) -> Iterator[tuple[str, list, int, str]]:
    """Yield (name, values on all ranks, step, place) for each setting in each step.

    The ranks may make different numbers of passes. None: a rank never has the setting.
    """
    ranks = [{} for _ in job.processes]
    for own, process in zip(ranks, job.processes, strict=True):
        for one in process.of(Facts):
            for name, value in one.values.items():
                values, _ = own.setdefault(name, {}).setdefault(one.step, ([], one))
                values.append(value)
    for name in dict.fromkeys(x for own in ranks for x in own):
        there = [own[name] for own in ranks if name in own]
        for step in there[0]:
            if all(step in one for one in there):
                where = there[0][step][1].place
                rows = [own[name][step][0] if name in own else None for own in ranks]
                sets = [{*one} if one else None for one in rows]
                if None not in sets and set.intersection(*sets):
                    yield name, [rows[0][0]] * len(rows), step, where
                else:
                    yield name, [one and one[0] for one in rows], step, where


@check(LAW, RISK, needs=[Fitted], causes=[datasets_differ], read="lesson 4")
def fits_differ(job):
    """The ranks have fitted their preprocessing to different data.

    Fit on all training samples, or fit on rank 0 and broadcast what it has learned.
    Not a mistake if: each rank is meant to have a preprocessing of its own.
    """
    rows = [one.values for process in job.processes for one in process.of(Fitted)]
    shared = set.intersection(*map(set, rows))
    found = [x for x in sorted(shared) if not alike([row[x] for row in rows], 1e-6)]
    for name in found[:1]:
        told = ", ".join(
            f"{row[name][0]:.6g} on rank {n}" for n, row in enumerate(rows)
        )
        what = f"{len(found)} learned attributes differ, such as {name}: {told}"
        yield Breach(what, job.of(Step)[0].place)
