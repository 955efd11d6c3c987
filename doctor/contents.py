"""Whether samples of the same number, or numbers of the same sample, differ."""

from itertools import combinations

from .job import Job, Process
from .reads import feeds


def other_contents(job: Job, labels: bool) -> str:
    """Return how samples of the same number differ between two ranks, or ""."""
    first = feeds(job)
    epoch = [p.batches(p.epochs[0]) for p in job.processes if p.epochs]
    read = [{x for b in one for x in b.indices or ()} for one in epoch]
    if not first or len(read) < 2 or any(one & read[0] for one in read[1:] if one):
        if not first or not all(one.divides for one in first):
            return ""  # the ranks' numbers may belong to different samples
    found = [contents(process, labels) for process in job.processes]
    for one, other in combinations(range(len(found)), 2):
        both = found[one].keys() & found[other].keys()
        differ = sum(found[one][x] != found[other][x] for x in both)
        if differ > max(4, 0.05 * len(both)):
            what = "labels" if labels else "contents"
            text = f"{differ} of {len(both)} samples that ranks {one} and {other} have "
            return f"{text}both read have different {what} on the two ranks"
    return ""


def contents(process: Process, labels: bool) -> dict[int, int]:
    """Return labels or hashes of samples by number; {} if they change with time."""
    found = {}
    batches = [x for epoch in process.epochs for x in process.batches(epoch)]
    for one in batches:
        values = one.labels if labels else one.rows
        for pair in zip(one.indices or (), values or (), strict=False):
            found.setdefault(pair[0], []).append(pair[1])
    again = [x for x in found.values() if len(x) > 1]
    stay = sum(len({*x}) == 1 for x in again)
    fixed = len(again) > 4 and stay > 0.9 * len(again)
    return {index: x[0] for index, x in found.items()} if fixed else {}
