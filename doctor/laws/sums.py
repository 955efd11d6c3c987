"""Law 7: printed results are true. Checks sums over all ranks."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from ..law import RISK, WRONG, Breach, check, several
from ..numbers import gap_of, others, results
from ..results import Printed
from .meeting import Call
from .printed import LAW

RATIOS = re.compile(r"\w*auc|auroc|auprc|rmse|r2|kappa|mcc")  # no means over samples
PER_CLASS = re.compile(r"m?iou|f1|precision|recall")  # nor are these, for each class
Rows = list[tuple[Call, ...]]  # calls of collectives, one per rank


@check(LAW, WRONG, needs=[Call], read="pitfall 16")
def reduced_again(job):
    """Sums over all ranks are all-reduced again.

    Add up each rank's own numbers, and call all_reduce() once, at the end.
    """
    found, run, last = Counter(), Counter(), {}
    for row in zip(*(process.of(Call) for process in job.processes), strict=False):
        one, values = row[0], [x.value for x in row]
        if one.name == "all_reduce" and None not in values and len(row) > 1:
            total = last.get(one.place, max(values) + 1)  # what the last call returned
            grows = 2 * total >= max(values) >= min(values) >= 0.999 * total > 0
            run[one.place] = run[one.place] + 1 if grows else 0
            found[one.place] += run[one.place] > 1  # the second call: equal to a sum
            last[one.place] = sum(values)
            if found[one.place] > 1:
                what = f"all_reduce() gets {min(values):.6g} or more on each rank, "
                what += f"after it returned {total:.6g}: it sums earlier sums again"
                yield Breach(what, one.place)
                return


@check(LAW, RISK, needs=[Call, Printed], read="pitfall 16")
def local_divisor(job):
    """A printed result is a sum over all ranks, divided by one rank's count.

    Sum the numerator and the count over all ranks; divide once.
    Not a mistake if: the other ranks' counts are not part of the result.
    """
    for name, count, text, line in explained(job, divided):
        what = f"rank {line.rank} prints {text}, which is a sum over all ranks, "
        what += f"divided by rank {line.rank}'s own {name} ({count} prints)"
        yield Breach(what, line.place)


@check(LAW, RISK, needs=[Call, Printed], read="pitfall 16")
def averaged_metric(job):
    """A metric of all samples is printed as the mean of the ranks' own metrics.

    Compute it from all ranks' predictions, or from counts that are summed over all
    ranks, such as a confusion matrix.
    Not a mistake if: you define the metric as the mean over parts of the data.
    """
    for name, count, text, line in explained(job, averaged):
        what = f"rank {line.rank} prints the {name} {text}, which is the mean of the "
        yield Breach(f"{what}ranks' own values ({count} prints)", line.place)


def explained(job, read: Callable) -> Iterator[tuple[str, int, str, Printed]]:
    """Yield (explanation, count, last number, its line) for each explained place.

    `read(line, rank, rows)` yields (which number, its text, possible explanations).
    """
    several(job)
    calls, sites = defaultdict(list), defaultdict(list)
    for row in zip(*(process.of(Call) for process in job.processes), strict=False):
        if all(x.value is not None for x in row):
            for rank, one in enumerate(row):
                calls[rank, one.step].append(row)
    for rank, process in enumerate(job.processes):
        for line in process.of(Printed):
            rows = [x for x in calls[rank, line.step] if x[rank].time < line.time]
            for which, text, fits in read(line, rank, rows) if rows else ():
                sites[rank, line.place, which].append((fits, text, line))
    for found in sites.values():
        names = set.intersection(*(fits for fits, _, _ in found))
        if names and len({text for _, text, _ in found}) > 1:
            yield min(names), len(found), *found[-1][1:]


def divided(line: Printed, rank: int, rows: Rows) -> Iterator[tuple]:
    """Explain numbers as a sum over all ranks, divided by one of the rank's counts."""
    rows, found = [row for row in rows if summed(row)], []
    totals = [sum(x.value for x in row) for row in rows]
    for row, total in zip(rows, totals, strict=True):
        for name in set.intersection(*({*x.counts} for x in row)):
            counts = [x.counts[name] for x in row]
            own = counts.pop(rank)
            # Rank 0 may have the sum of all counts
            if own < 1.5 * max(counts) and own not in totals and {*counts} != {own}:
                found.append((name, total / own))
    numbers = [(x.value, x.gap, x.text) for x in results(line.text)]
    numbers += [(float(x), gap_of(x), x) for _, x in others(line.text)]
    for which, (value, gap, text) in enumerate(numbers if rows else ()):
        near = {k for k, x in found if min(abs(n * x - value) for n in (1, 100)) < gap}
        yield which, text, near if gap < 0.002 * value else set()


def averaged(line: Printed, rank: int, rows: Rows) -> Iterator[tuple]:
    """Explain metrics as the mean of the ranks' own numbers."""
    for name, text in others(line.text):
        short = re.sub(r".*[_/]", "", name)
        each = PER_CLASS.fullmatch(short)
        if each or RATIOS.fullmatch(short):
            own = [x for x in rows if not (each and x[0].sent.startswith("1 x"))]
            yield name, text, {name} if any(is_mean(x, text) for x in own) else set()


def is_mean(row: tuple[Call, ...], text: str) -> bool:
    """Return whether a printed number is the mean of the ranks' own numbers."""
    own = [x.value / max(1, int(x.sent.partition(" ")[0])) for x in row]
    near = [abs(x * sum(own) / len(own) - float(text)) < gap_of(text) for x in (1, 100)]
    whole = any("float" not in x.sent for x in row)
    return any(near) and not whole and max(own) - min(own) > 2 * gap_of(text)


def summed(row: tuple[Call, ...]) -> bool:
    """Return whether all ranks sum one number in the same line."""
    single = all(x.sent.startswith("1 x") for x in row)
    return single and len({x.place for x in row}) == 1 and "reduce" in row[0].name
