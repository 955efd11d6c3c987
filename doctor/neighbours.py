"""The inputs of networks that no DataLoader feeds, and their neighbours."""

from array import array
from dataclasses import dataclass
from itertools import combinations
from math import dist

from .event import Event
from .job import Job
from .law import need


@dataclass(kw_only=True)
class Input(Event):
    """A network has got an input, with gradients enabled."""

    network: int
    rows: array  # a hash for each entry of the input's largest tensor
    loaded: bool  # a DataLoader gave the last batch
    few: list[list[float]]  # of each entry, if no DataLoader gave it
    whole: bool  # they are whole numbers, such as tokens


def networks(job: Job) -> list[list[list[Input]]]:
    """Return each network's first inputs of each step, by rank."""
    found = []
    for number in sorted({one.network for one in job.of(Input)}):
        ranks = []
        for process in job.processes:
            first = {}
            for one in process.of(Input):
                if one.network == number:
                    first.setdefault(one.step, one)
            ranks.append([*first.values()])
        found += [ranks] * all(ranks)
    return found


def inputs(job: Job) -> list[list[Input]]:
    """Return the inputs of the first network that gets other ones on each rank."""
    every = need(networks(job), "no input was seen")
    return next((one for one in every if not same_rows(one)), every[-1])


def noise(job: Job) -> bool:
    """Return whether a network gets the same on two ranks, but samples differ."""
    same = [same_rows(one) for one in networks(job)]
    return any(same) and (not all(same) or any(one.loaded for one in job.of(Input)))


def same_rows(ranks: list[list[Input]]) -> bool:
    """Return whether two ranks have the same inputs."""
    for one, other in combinations(ranks[:8], 2):
        pairs = [*zip(one, other, strict=False)]
        same = [tuple(a.rows) for a, b in pairs if a.rows == b.rows]
        changes = len({*same}) > max(2, 0.9 * len(same))
        if len(same) >= 0.9 * len(pairs) and changes:
            return True
    return False


def twins(job: Job) -> tuple[float, float, float, float]:
    """Compare the nearest neighbours of inputs that random changes make distinct.

    If each sample is read once, an input's nearest neighbour is as often on its own
    rank as on another one.

    Returns:
        The share of samples that two ranks read, by how many standard errors it is not
        0, how often two neighbours have the same place in the same step, and how often
        they are in the same or the next step.
    """
    whole = any(one.whole for one in job.of(Input))
    gap = (lambda a, b: sum(map(int.__ne__, a, b))) if whole else dist
    lists, worst = inputs(job), (0.0, 0.0, 0.0, 0.0)
    batches = min(map(len, lists))
    for part in (batches // 4, 2 * batches // 5, batches):  # epochs are not known
        ranks = [
            [
                (number, place, row)
                for number, one in enumerate(rows[:part])
                for place, row in enumerate(one.few)
            ][:800]
            for rows in lists[:4]
        ]
        for one, other in combinations(ranks, 2):
            if min(len(one), len(other)) >= 100:
                worst = max(worst, neighbours(one, other, gap), key=lambda x: x[1])
    return worst


def neighbours(one: list[tuple], other: list[tuple], gap) -> tuple:
    """Return twins()'s numbers for two ranks' inputs: (batch, place, numbers)."""
    wins = losses = there = near = 0
    for number, place, row in one:
        own = min(gap(row, x) for m, n, x in one if (m, n) != (number, place))
        least, m, n = min((gap(row, x), m, n) for m, n, x in other)
        wins, losses = wins + (least < own), losses + (least > own)
        there += least < own and (m, n) == (number, place)
        near += least < own and abs(m - number) < 2
    chance = len(other) / (len(one) + len(other) - 1)
    count, wins = max(1, wins + losses), max(1, wins)
    error = 1.3 * (0.25 / count) ** 0.5  # neighbours come in pairs
    excess = wins / count - chance
    return excess / (1 - chance), excess / error, there / wins, near / wins
