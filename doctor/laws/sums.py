"""Law 7: printed results are true. Checks sums over all ranks."""

import re
from collections import Counter

from ..law import RISK, WRONG, Breach, check, several
from ..numbers import others, results
from ..results import Printed
from .meeting import Call
from .printed import LAW

RATIOS = re.compile(  # metrics that are no means over samples
    r"(?:m|mean)?iou|f1|(?:mean_)?ap|\w*auc|auroc|auprc|precision|recall|bleu|rmse|r2|"
    r"wer|cer|kappa|mcc"
)


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
    several(job)
    calls, sites = [process.of(Call) for process in job.processes], {}
    rows = [row for row in zip(*calls, strict=False) if summed(row)]
    for line in job.of(Printed):
        own = next(n for n, x in enumerate(job.processes) if x.rank == line.rank)
        done = [x for x in rows if x[own].step == line.step and x[own].time < line.time]
        found = [(x.value, x.gap, x.text) for x in results(line.text)]
        for _, text in others(line.text):
            found.append((float(text), 0.6 * 10 ** -len(text.partition(".")[2]), text))
        for order, (value, gap, text) in enumerate(found if done else ()):
            fits = divided(done, own, value, gap)
            key = line.place, line.rank, order
            sites.setdefault(key, []).append((fits, text, line))
    for prints in sites.values():
        counts = Counter(name for fits, _, _ in prints for name in fits)
        name, count = counts.most_common(1)[0] if counts else ("", 0)
        if count == len(prints) > 1 and len({text for _, text, _ in prints}) > 1:
            _, text, line = prints[-1]
            what = f"rank {line.rank} prints {text}, which is a sum over all ranks, "
            what += f"divided by rank {line.rank}'s own {name} ({count} prints)"
            yield Breach(what, line.place)
            return


@check(LAW, RISK, needs=[Call, Printed], read="pitfall 16")
def averaged_metric(job):
    """A printed metric is the mean of the ranks' own values, which is another number.

    Compute it from all ranks' predictions, or from counts that are summed over all
    ranks, such as a confusion matrix.
    Not a mistake if: you define the metric as the mean over parts of the data.
    """
    several(job)
    calls, sites = [process.of(Call) for process in job.processes], {}
    for line in job.of(Printed):
        own = next(n for n, x in enumerate(job.processes) if x.rank == line.rank)
        rows = [row for row in zip(*calls, strict=False) if row[own].step == line.step]
        rows = [row for row in rows if row[own].time < line.time and numbers(row)]
        for name, text in others(line.text) if rows else ():
            if RATIOS.fullmatch(re.sub(r".*[_/]", "", name)):
                fits = any(averages(row, text) for row in rows)
                sites.setdefault((name, line.place), []).append((fits, text, line))
    for (name, place), prints in sites.items():
        if (
            all(fits for fits, *_ in prints)
            and len({text for _, text, _ in prints}) > 1
        ):
            _, text, line = prints[-1]
            what = (
                f"rank {line.rank} prints the {name} {text}, which is the mean of the "
            )
            yield Breach(f"{what}ranks' own numbers ({len(prints)} prints)", place)


def numbers(row: tuple[Call, ...]) -> bool:
    """Return whether doctor knows the floating-point numbers of a collective."""
    return all(x.value is not None and "float" in x.sent for x in row)


def averages(row: tuple[Call, ...], text: str) -> bool:
    """Return whether a printed number is the mean of the ranks' own numbers."""
    own = [x.value / int(x.sent.partition(" ")[0]) for x in row]
    gap = 0.6 * 10 ** -len(text.partition(".")[2])
    near = any(abs(x * sum(own) / len(own) - float(text)) < gap for x in (1, 100))
    return near and max(own) - min(own) > 2 * gap


def summed(row: tuple[Call, ...]) -> bool:
    """Return whether all ranks sum one number in the same line."""
    known = all(x.value is not None and x.sent.startswith("1 x") for x in row)
    return known and len({x.place for x in row}) == 1 and "reduce" in row[0].name


def divided(rows: list[tuple], own: int, value: float, gap: float) -> set[str]:
    """Return the names of rank-dependent counts by which a sum was divided."""
    totals, found = [sum(x.value for x in row) for row in rows], set()
    for row, total in zip(rows, totals, strict=True):
        for name in set.intersection(*({*x.counts} for x in row)):
            counts = [x.counts[name] for x in row]
            most = max(x for n, x in enumerate(counts) if n != own)
            near = [abs(x * total / counts[own] - value) < gap for x in (1, 100)]
            # Rank 0 may have the sum of all counts
            local = counts[own] < 1.5 * most and counts[own] not in totals
            if any(near) and local and len({*counts}) > 1 and gap < 0.002 * value:
                found.add(name)
    return found
