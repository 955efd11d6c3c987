"""Law 2: ranks are exchangeable. Checks the targets of losses."""

from collections import Counter, defaultdict
from math import isfinite, prod, sqrt
from random import Random
from statistics import correlation, fmean, pstdev

from ..event import Event
from ..job import Process
from ..law import RISK, Breach, Doubt, check, need
from ..neighbours import Input, Targets
from ..record import place, recorder, torch, wrap
from ..sample import digest, numbers
from ..watcher import Watcher
from .ranks import LAW
from .samples import datasets_differ

FEWEST = 8  # minimum number of samples with a token or a class
Samples = list[tuple[dict[int, float], float]]  # features and a target


class Contrast(Event, limit=400):
    """A loss over all ranks' candidates, one of which is right for each sample."""

    first: int  # the first sample's target; the others are the next integers
    count: int  # number of samples, and of each rank's candidates
    place: str
    candidate: int = 0  # a hash of the first candidate, or 0 if it is unknown
    loss: float = 0.0


class Candidates(Watcher):
    """Records the targets of contrastive losses."""

    def __init__(self):
        self.pending = []

    def hooks(self) -> None:
        wrap(torch.nn.functional, "cross_entropy", self.loss)

    def loss(self, call, /, *args, **kwargs):
        """Record the targets if they are consecutive indices of candidates."""
        result = call(*args, **kwargs)
        joined = torch.distributed.is_initialized() and recorder.watching
        if not (joined and result.requires_grad and result.dim() == 0):
            return result
        scores, target = (*args, kwargs.get("target"))[:2]
        size, count = torch.distributed.get_world_size(), target.numel()
        fits = target.dim() == 1 and scores.shape == (count, size * count)
        if fits and size > 1 and count > 1 and not target.is_floating_point():
            if bool((target.diff() == 1).all()):
                own = {"first": int(target[0]), "candidate": first_candidate(scores)}
                one = Contrast(count=count, place=place(), **own)
                self.pending.append((one, result.detach()))
        return result

    def on_step(self, optimizer, weights, gradients) -> None:
        pending, self.pending = self.pending, []
        losses = numbers([loss for _, loss in pending], 1)
        for (one, _), (one.loss,) in zip(pending, losses, strict=True):
            recorder.write(one)


def first_candidate(scores) -> int:
    """Return a hash of the candidate that the first column of scores (N, M) is about.

    Return 0 unless the scores are the product of two matrices, times a constant.
    """
    node = scores.grad_fn
    for _ in range(6):
        found = getattr(node, "_saved_mat2", None)
        if found is not None and found.size(-1) == scores.size(1):
            return digest(numbers([found[..., :1]]))
        node = next((x for x, _ in getattr(node, "next_functions", ()) if x), None)
    return 0


@check(LAW, RISK, needs=[Contrast])
def same_targets(job):
    """The targets of a loss over all ranks' candidates do not depend on the rank.

    Add the index of the rank's first candidate: torch.arange(n) + rank * n.
    Not a mistake if: each rank puts its own candidates first.
    """
    rows = [row for row in job.rows(Contrast) if len({x.place for x in row}) == 1]
    same = [row for row in rows if len({x.first for x in row}) == 1]
    if len(same) < max(8, 0.9 * len(rows)):
        return
    later, one = same[len(same) // 2 :], same[0][0]
    losses = [[x.loss for x in row] for row in later]
    means = [fmean(own) for own in zip(*losses, strict=True)]
    above = sum(min(row[1:]) > row[0] for row in losses)
    text = f"the targets are {one.first} to {one.first + one.count - 1} on every rank"
    heads = [{x.candidate for x in row} for row in same]
    if all(len(x) == 1 and 0 not in x for x in heads):
        yield Breach(f"{text}, and the first candidate is the same one", one.place)
    elif above < 0.75 * len(later) or min(means[1:]) < 1.05 * means[0]:
        raise Doubt(f"{text}, which is right if each rank's own candidates come first")
    else:
        told = ", ".join(f"{x:.3g} on rank {n}" for n, x in enumerate(means[:4]))
        yield Breach(f"{text}, and the later losses are {told}", one.place)


@check(LAW, RISK, needs=[Input, Targets], causes=[datasets_differ])
def meanings_differ(job):
    """Ids (of words, for example) or classes mean different things on each rank.

    Build the vocabulary from all samples, or build it on rank 0 and broadcast it.
    Not a mistake if: each rank is meant to learn a task of its own.
    """
    first, *ranks = [samples(process) for process in job.processes[:4]]
    for rank, other in enumerate(ranks, 1):
        cells = common(first, other)
        need(len(cells) > 9, "too few samples of each class were seen")
        rows = [related(x, cells) for x in (first, other)]
        # These are standard normal numbers if inputs and targets are independent
        sizes = [sum(x * x for x in row) for row in rows]
        count = len(cells)
        found = correlation(*rows) if min(map(pstdev, rows)) else 1
        wanted = sqrt(prod(max(0, 1 - count / size) for size in sizes))
        if found < wanted / 3 and (wanted - found) * sqrt(count) > 5:
            errors = min(map(beyond, (first, other), [cells] * 2, sizes))
            if errors > 8:
                what = f"on ranks 0 and {rank}, targets depend differently on inputs: "
                what += f"the correlation is {found:.2f}, not {wanted:.2f}"
                yield Breach(what, job.of(Input)[0].place)
                return


def samples(process: Process) -> Samples:
    """Return a rank's distinct samples, as (features, target)."""
    found, targets = {}, {(x.step, x.count): x for x in process.of(Targets)[::-1]}
    for one in process.of(Input):
        known = targets.get((one.step, len(one.rows)))
        values = known.values if known else ()
        for row, few, target in zip(one.rows, one.few, values, strict=False):
            if all(map(isfinite, (*few, target))):
                features = dict.fromkeys(few, 1.0) if one.whole else enumerate(few)
                found.setdefault(row, (dict(features), target))
    return [*found.values()][:800]


def common(*ranks: Samples) -> list[tuple]:
    """Return the pairs (feature, class) that have enough samples on all ranks."""
    features, classes = [], []
    for own in ranks:
        counts, most = defaultdict(Counter), len(own) - FEWEST
        for values, _ in own:
            for name, value in values.items():
                counts[name][value] += 1
        often = {k: x for k, x in counts.items() if x.total() >= FEWEST}
        features.append({k for k, x in often.items() if max(x.values()) <= most})
        targets = Counter(target for _, target in own)
        classes.append({x for x, n in targets.items() if FEWEST <= n <= most})
    targets = sorted(set.intersection(*classes))
    binary = len(targets) == 2 and all(len({x for _, x in y}) == 2 for y in ranks)
    names = sorted(set.intersection(*features))[:200]
    return [(x, y) for y in targets[binary:][:6] for x in names]


def related(own: Samples, cells: list[tuple]) -> list[float]:
    """Return the correlation of each pair's feature and class, times sqrt(samples)."""
    sums, squares, both = Counter(), Counter(), Counter()
    classes, count = Counter(target for _, target in own), len(own)
    for values, target in own:
        for name, x in values.items():
            sums[name] += x
            squares[name] += x * x
            both[name, target] += x
    found = []
    for name, target in cells:
        share = classes[target] / count
        spread = squares[name] / count - (sums[name] / count) ** 2
        gap = both[name, target] - share * sums[name]
        found.append(gap / sqrt(max(1e-12, spread * share * (1 - share)) * count))
    return found


def beyond(own: Samples, cells: list[tuple], size: float) -> float:
    """Return how many standard errors `size` is above its mean for shuffled targets."""
    order, sizes, targets = Random(0), [], [target for _, target in own]
    for _ in range(24):
        order.shuffle(targets)
        mixed = [(x, y) for (x, _), y in zip(own, targets, strict=True)]
        sizes.append(sum(x * x for x in related(mixed, cells)))
    return (size - fmean(sizes)) / (pstdev(sizes) or 1)
