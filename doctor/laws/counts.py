"""Law 7: printed accuracies and losses equal those of the networks' outputs. Counts."""

from collections import Counter

from ..law import WRONG, Breach, check
from .meeting import Call
from .printed import LAW


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
