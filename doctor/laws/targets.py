"""Law 2: ranks are exchangeable. Checks the targets of losses."""

from itertools import combinations
from math import isfinite, prod, sqrt
from random import Random
from statistics import correlation, fmean, pstdev

from ..event import Event
from ..job import Process
from ..law import RISK, Breach, Doubt, NotJudged, check, several
from ..neighbours import Input, Targets
from ..record import place, recorder, torch, wrap
from ..sample import numbers
from ..watcher import Watcher
from .ranks import LAW
from .samples import datasets_differ

FEWEST = 8  # minimum number of samples with a token or a class
Samples = list[tuple[dict[int, float], float]]  # features and a target


class Contrast(Event, limit=400):
    """A loss over all ranks' candidates, one of which is right for each sample."""

    first: int  # the first sample's target; the others are the next integers
    count: int  # number of samples, and of each rank's candidates
    loss: float
    place: str


class Candidates(Watcher):
    """Records the targets of contrastive losses."""

    def __init__(self):
        self.pending = []

    def hooks(self) -> None:
        wrap(torch.nn.functional, "cross_entropy", self.loss)

    def loss(self, call, /, *args, **kwargs):
        result = call(*args, **kwargs)
        joined = torch.distributed.is_initialized() and recorder.watching
        if joined and result.requires_grad and result.dim() == 0:
            self.look(result, *args[:2])
        return result

    def look(self, result, scores, target) -> None:
        """Record the targets if they are consecutive indices of candidates."""
        size, count = torch.distributed.get_world_size(), target.numel()
        fits = target.dim() == 1 and scores.shape == (count, size * count)
        if fits and size > 1 and count > 1 and not target.is_floating_point():
            steps = torch.arange(count, device=target.device)
            if torch.equal(target - target[0], steps):
                self.pending.append((int(target[0]), count, result.detach(), place()))

    def on_step(self, optimizer, weights, gradients) -> None:
        pending, self.pending = self.pending, []
        losses = numbers([one[2] for one in pending], 1)
        for (first, count, _, where), (loss,) in zip(pending, losses, strict=True):
            recorder.write(Contrast(first=first, count=count, loss=loss, place=where))


# --- checks ---


@check(LAW, RISK, needs=[Contrast])
def same_targets(job):
    """The targets of a loss over all ranks' candidates do not depend on the rank.

    Add the index of the rank's first candidate: torch.arange(n) + rank * n.
    Not a mistake if: each rank puts its own candidates first.
    """
    several(job)
    rows = [row for row in job.rows(Contrast) if len({x.place for x in row}) == 1]
    same = [row for row in rows if len({x.first for x in row}) == 1]
    if len(same) < max(8, 0.9 * len(rows)):
        return
    later, one = same[len(same) // 2 :], same[0][0]
    losses = [[x.loss for x in row] for row in later]
    means = [fmean(own) for own in zip(*losses, strict=True)]
    above = sum(min(row[1:]) > row[0] for row in losses)
    text = f"the targets are {one.first} to {one.first + one.count - 1} on every rank, "
    text += f"among the {one.count * len(same[0])} candidates of all ranks"
    if above < 0.75 * len(later) or min(means[1:]) < 1.05 * means[0]:
        raise Doubt(f"{text}, which is right if each rank's own candidates come first")
    told = ", ".join(f"{x:.3g} on rank {n}" for n, x in enumerate(means[:4]))
    yield Breach(f"{text}, and the later losses are {told}", one.place)


@check(LAW, RISK, needs=[Input, Targets], causes=[datasets_differ])
def meanings_differ(job):
    """Ids (of words, for example) or classes mean different things on each rank.

    Use the same ids and classes on all ranks: build the vocabulary from all samples, or
    build it on rank 0 only and broadcast it.
    Not a mistake if: each rank is meant to learn a task of its own.
    """
    several(job)
    ranks = [samples(process) for process in job.processes[:4]]
    for one, other in combinations(range(len(ranks)), 2):
        own = ranks[one], ranks[other]
        cells = common(*own)
        if len(cells) < 10:
            raise NotJudged("too few samples of each class were seen")
        rows = [related(x, cells) for x in own]
        # These are standard normal numbers if inputs and targets are independent
        sizes = [sum(x * x for x in row) for row in rows]
        if min(map(pstdev, rows)) == 0:
            continue
        found, count = correlation(*rows), len(cells)
        wanted = sqrt(prod(max(0, 1 - count / size) for size in sizes))
        if not (found < wanted / 3 and (wanted - found) * sqrt(count) > 5):
            continue
        errors = min(beyond(x, cells, size) for x, size in zip(own, sizes, strict=True))
        if not errors > 8:
            continue
        what = f"on ranks {one} and {other}, targets depend on inputs (by {errors:.0f} "
        what += f"standard errors or more), but differently: over {count} pairs of "
        what += f"a feature and a class, the correlation is {found:.2f}, not about "
        yield Breach(f"{what}{wanted:.2f}", job.of(Input)[0].place)
        return


def samples(process: Process) -> Samples:
    """Return a rank's distinct samples, as (features, target)."""
    found, targets = {}, {}
    for one in process.of(Targets):
        targets.setdefault(one.step, []).append(one)
    for one in process.of(Input):
        fits = [x for x in targets.get(one.step, ()) if x.count == len(one.rows)]
        values = fits[0].values if fits else ()
        for row, few, target in zip(one.rows, one.few, values, strict=False):
            if not all(map(isfinite, (*few, target))):
                continue
            features = dict.fromkeys(few, 1.0) if one.whole else dict(enumerate(few))
            found.setdefault(row, (features, target))
    return [*found.values()][:800]


def common(*ranks: Samples) -> list[tuple]:
    """Return the pairs (feature, class) that have enough samples on all ranks."""
    features, classes = [], []
    for own in ranks:
        counts, targets, seen = {}, {}, {}
        for values, target in own:
            targets[target] = targets.get(target, 0) + 1
            for name, value in values.items():
                counts[name] = counts.get(name, 0) + (value != 0)
                seen.setdefault(name, set()).add(value)
        most = len(own) - FEWEST
        often = {x for x, n in counts.items() if n >= FEWEST}
        features.append({x for x in often if counts[x] <= most or len(seen[x]) > 2})
        classes.append({x for x, n in targets.items() if FEWEST <= n <= most})
    targets = sorted(set.intersection(*classes))
    binary = len(targets) == 2 and all(len({x for _, x in y}) == 2 for y in ranks)
    names = sorted(set.intersection(*features))[:200]
    return [(x, y) for y in targets[binary:][:6] for x in names]


def related(own: Samples, cells: list[tuple]) -> list[float]:
    """Return the correlation of each pair's feature and class, times sqrt(samples)."""
    sums, squares, both, classes = {}, {}, {}, {}
    for values, target in own:
        classes[target] = classes.get(target, 0) + 1
        for name, x in values.items():
            sums[name] = sums.get(name, 0) + x
            squares[name] = squares.get(name, 0) + x * x
            both[name, target] = both.get((name, target), 0) + x
    found, count = [], len(own)
    for name, target in cells:
        share = classes[target] / count
        spread = squares[name] / count - (sums[name] / count) ** 2
        gap = both.get((name, target), 0) - share * sums[name]
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
