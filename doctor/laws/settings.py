"""Law 2: ranks are exchangeable. Compares the ranks' settings."""

from collections import Counter
from collections.abc import Iterator
from itertools import groupby

from ..law import RISK, Breach, check, need
from ..reads import Feed
from .ranks import LAW, Facts
from .samples import datasets_differ, undivided


@check(LAW, RISK, general=True, causes=[datasets_differ])
def settings_differ(job):
    """The ranks train with different settings.

    Use one setting on all ranks; after an evaluation on one rank, call train() there.
    Not a mistake if: the ranks are meant to differ, for example in their batch sizes.
    """
    undivided(job)
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
