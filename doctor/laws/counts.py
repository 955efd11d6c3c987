"""Law 7: printed accuracies and losses equal those of the networks' outputs. Counts."""

from collections import Counter

from ..law import RISK, WRONG, Breach, check
from ..results import Measured, Printed
from .meeting import Call
from .printed import LAW


@check(LAW, RISK)
def compared_with_itself(job):
    """On one rank, a validation's comparisons never find an error.

    Among the candidates of all ranks, leave out the sample itself: rank * n + index.
    Not a mistake if: this rank's samples are much easier.
    """
    hits = {}
    for process in job.processes:
        counts = Counter()
        for one in process.of(Measured):
            if one.what == "pairs" and not one.trains:
                counts[one.after] += 1
                key, rank = counts[one.after], process.rank
                own = hits.setdefault(key, {}).setdefault(rank, [0, 0, 0])
                same = sum(a == b for a, b in zip(one.values, one.weights, strict=True))
                more = same, len(one.values), 1
                hits[key][rank] = [a + b for a, b in zip(own, more, strict=True)]
    for found in hits.values():
        rates = {rank: same / count for rank, (same, count, _) in found.items()}
        rank = max(rates, key=rates.get)
        same, count, passes = found[rank]
        if same == count > 99 and passes > 1 and min(rates.values()) < 0.95:
            told = [f"{x[0]} of {x[1]} on rank {n}" for n, x in sorted(found.items())]
            what = f"the classes that a validation compares are equal in {told[0]}, "
            place = job.of(Printed)[0].place if job.of(Printed) else ""
            yield Breach(what + ", ".join(told[1:4]), place)
            return


@check(LAW, WRONG, needs=[Call], read="pitfall 16")
def reduced_again(job):
    """Sums over all ranks are summed over all ranks again.

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
