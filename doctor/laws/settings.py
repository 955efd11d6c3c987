"""Law 2: ranks are exchangeable. Compares the ranks' settings."""

import gc
import re
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from ..event import Event
from ..law import RISK, Breach, check, need
from ..moments import Step
from ..objects import BLOCKS, is_users, used_by
from ..record import recorder, torch
from ..sample import digest
from ..watcher import Watcher
from .ranks import LAW, Facts
from .replicas import alike
from .samples import datasets_differ, undivided

FITS = 0, 1, 20  # steps before which doctor reads what objects have learned
LEARNED = re.compile("(?:^|_)(?:mean|std|var|median|mu|sigma|scale)s?(?:_|$)", re.I)
USES = re.compile("loss|forward|__call__|__getitem__|__iter__|normali|encod|transform")


class Fitted(Event, limit=len(FITS)):
    """What objects have learned from data, such as StandardScaler.mean_."""

    values: dict[str, list[float]]  # a few numbers, by class and attribute


class Settings(Watcher):
    """Records what objects have learned."""

    def __init__(self):
        self.first = None  # Fitted.values

    def on_input(self, network, inputs) -> None:
        if not torch.is_grad_enabled():
            return
        due = recorder.step == (*FITS, None)[recorder.written[Fitted]]
        if due and sys.getallocatedblocks() < BLOCKS:
            every = gc.get_objects()
            kinds = {x for x in {*map(type, every)} if is_users(x) or sklearns(x)}
            own = [one for one in every if type(one) in kinds]
            values = fitted(own, self.first)
            self.first = self.first or values
            recorder.write(Fitted(values=values))


def sklearns(kind: type) -> bool:
    """Return whether scikit-learn defines a class."""
    return str(kind.__module__).startswith("sklearn.")


def fitted(objects: list, first: dict | None = None) -> dict[str, list[float]]:
    """Return Fitted.values: of changes since `first`, only those that methods use."""
    found, again = {}, set()
    for one in objects:
        kind = type(one)
        for name, value in [*getattr(one, "__dict__", {}).items()]:
            what = "network " * isinstance(one, torch.nn.Module)
            label = f"{what}{kind.__name__}.{name}"
            fits = name.endswith("_") or (LEARNED.search(name) and not sklearns(kind))
            if fits and name[0] != "_" and (few := few_of(value)):
                again |= {label} & found.keys()
                same = first is None or first.get(label) == few
                if same or name in used_by(kind, *filter(USES.search, dir(kind))):
                    found[label] = few  # else perhaps a meter
    return {name: few for name, few in found.items() if name not in again}


def few_of(value) -> list[float]:
    """Return a few numbers of an array, a table, a dictionary of these, or a number."""
    if isinstance(value, (int, float)):
        return [float(value)]
    if isinstance(value, dict):
        return [x for one in [*value.values()][:8] for x in few_of(one)]
    if isinstance(value, torch.Tensor):
        value = value.detach().double().cpu().numpy() if value.numel() < 9 else None
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
    for name, row, step, line in facts(job):
        count[name] += 1
        if len({*row}) > 1:
            differ.setdefault(name, []).append((row, step, line))
    need(count, "no training pass was seen on all ranks")
    for name in sorted(differ, key=lambda name: -len(differ[name]))[:3]:
        number, (row, step, line) = len(differ[name]), differ[name][0]
        if number > max(2, 0.1 * count[name]):
            told = ", ".join(f"{x} on rank {n}" for n, x in enumerate(row[:4]))
            what = f"{name}: {told} in step {step + 1} and others ({number} passes)"
            yield Breach(what, line)
    names = ", ".join(name for name in count if " of " not in name)
    yield f"equal on all ranks in {max(count.values())} passes: {names}"


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


def lasting(job) -> Iterator[dict]:
    """Yield each rank's values that stay the same for some steps."""
    for process in job.processes:
        rows = [one.values for one in process.of(Fitted)]
        own = {} if rows[1:] else dict(*rows)
        for one, other in pairwise(rows):
            own |= {name: x for name, x in one.items() if other.get(name) == x}
        yield own


@check(LAW, RISK, needs=[Fitted], causes=[datasets_differ], read="lesson 4")
def fits_differ(job):
    """The ranks have fitted their preprocessing to different data.

    Fit on all training samples, or broadcast rank 0's; all-reduce running statistics.
    Not a mistake if: each rank is meant to have its own, or only prints these numbers.
    """
    rows = [*lasting(job)]
    every = [[one.values for one in row] for row in job.rows(Fitted)]
    for name, x in every[0][0].items() if len(every) == len(FITS) else ():
        log = name.startswith("network ")  # what changes in each pass, perhaps for logs
        if not log and all(y.get(name) == x for y in every[0]):  # learned since then
            for own, last in zip(rows, every[-1], strict=True):
                own[name] = last.get(name, x)
    shared = set.intersection(*map(set, rows))
    found = [x for x in sorted(shared) if not alike([row[x] for row in rows], 1e-6)]
    for name in found[:1]:
        told = ", ".join(f"{x[name][0]:.6g} on rank {n}" for n, x in enumerate(rows))
        what = f"{len(found)} learned attributes differ, such as {name}: {told}"
        yield Breach(what, job.of(Step)[0].place)
