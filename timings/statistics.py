"""What the turns of several cohorts decide, and how sure that is.

A cohort is one launch of every candidate. Candidates take turns in it, in an order in
which each follows each other one equally often. A launch is one sample: it differs from
the next by some percent, however long it is measured. So
candidates are compared by one figure per cohort, not by single intervals.
"""

import math
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy
from scipy import stats

AGAIN = " again"  # the name of the second copy of a candidate ends so
ERROR = 0.02  # chance of any wrong verdict in a mode
MARGIN = math.log(1.03)  # what counts as equal
LOOKS = 2  # cohorts between two looks at which a mode may end early


class Verdict(NamedTuple):
    """What is known of the speed of one candidate over that of another."""

    pair: tuple[str, str]
    verdict: str  # faster, slower, equal or undecided
    ratio: float
    low: float
    high: float


def williams(number: int) -> list[list[int]]:
    """Orders of `number` things in which each follows each other equally often.

    Source: Williams 1949, https://doi.org/10.1071/CH9490149
    """
    first = [n // 2 if n % 2 == 0 else number - (n + 1) // 2 for n in range(number)]
    rows = [[(n + shift) % number for n in first] for shift in range(number)]
    return rows if number % 2 == 0 else rows + [row[::-1] for row in rows]


def orders(names: Sequence[str], draw: random.Random) -> Iterator[list[str]]:
    """The orders of the turns in one cohort, block by block without end."""
    names = draw.sample(names, len(names))
    while True:
        rows = williams(len(names))
        for row in draw.sample(rows, len(rows)):
            yield [names[n] for n in row]


def levels(cohort: dict, without: Sequence[str] = ()) -> dict[str, float]:
    """The median of each candidate's log(seconds per image) in a cohort.

    Args:
        cohort: its "turns" begin with a name and the seconds per image of intervals.
        without: candidates that are left out.
    """
    logs: dict[str, list[float]] = {}
    for name, intervals, *_ in cohort["turns"]:
        if name not in without:
            logs.setdefault(name, []).extend(numpy.log(intervals))
    return {name: float(numpy.median(values)) for name, values in logs.items()}


class Fit:
    """Least squares of cohort + candidate, where all or some took part in each cohort.

    Where all did, residuals are those of a two-way table, with (C - 1)(k - 1) degrees
    of freedom.
    """

    def __init__(self, cohorts: Sequence[dict]):
        cells = [(c, *cell) for c, one in enumerate(cohorts) for cell in one.items()]
        self.names = list(dict.fromkeys(name for _, name, _ in cells))
        design = numpy.zeros((len(cells), len(cohorts) + len(self.names)))
        for row, (cohort, name, _) in enumerate(cells):
            design[row, cohort] = 1
            design[row, len(cohorts) + self.names.index(name)] = 1
        logs = numpy.array([value for *_, value in cells])
        inverse = numpy.linalg.pinv(design.T @ design)
        found = inverse @ design.T @ logs
        self.effects = found[len(cohorts) :]
        self.covariance = inverse[len(cohorts) :, len(cohorts) :]
        self.freedom = len(cells) - numpy.linalg.matrix_rank(design)
        residuals = logs - design @ found
        squares = float(residuals @ residuals)
        self.variance = squares / self.freedom if self.freedom else math.inf

    def compare(self, one: str, other: str) -> tuple[float, float]:
        """Log of the speed of `one` over that of `other`, and its standard error.

        Two copies of one candidate count as one, that of their mean.
        """
        weights = numpy.zeros(len(self.names))
        for name, sign in ((other, 1), (one, -1)):
            copies = [name, name + AGAIN] if name + AGAIN in self.names else [name]
            if name + AGAIN in (one, other):  # these two copies are compared
                copies = [name]
            for copy in copies:
                weights[self.names.index(copy)] += sign / len(copies)
        error = math.sqrt(self.variance * (weights @ self.covariance @ weights))
        return float(weights @ self.effects), error


def judge(fit: Fit, pairs: Sequence[tuple[str, str]], error: float) -> list[Verdict]:
    """Verdicts on pairs; the chance that any is wrong is `error` (Holm's method).

    Source: https://en.wikipedia.org/wiki/Holm%E2%80%93Bonferroni_method
    """
    compared = {pair: fit.compare(*pair) for pair in pairs}
    left, found = len(pairs), {}
    for pair in sorted(pairs, key=lambda p: -abs(compared[p][0]) / compared[p][1]):
        log, standard_error = compared[pair]
        half = math.inf  # of a single cohort
        if fit.freedom:
            half = stats.t.ppf(1 - error / left / 2, fit.freedom) * standard_error
        if abs(log) + half < MARGIN:  # both one-sided tests
            verdict = "equal"
        elif abs(log) > half:
            verdict = "faster" if log > 0 else "slower"
        else:
            verdict = "undecided"
        left -= abs(log) > half
        ends = (log, log - half, log + half)
        found[pair] = Verdict(pair, verdict, *map(math.exp, ends))
    return [found[pair] for pair in pairs]


class Decision(NamedTuple):
    """What a mode's cohorts decide at a look."""

    verdicts: list[Verdict]
    copies: list[Verdict]  # of the pair that is one candidate twice
    fit: Fit | None

    @property
    def honest(self) -> bool:
        """Whether two copies of one candidate came out as not different."""
        return bool(self.copies) and all(v.low <= 1 <= v.high for v in self.copies)

    @property
    def over(self) -> bool:
        """Whether nothing is left to be decided."""
        return self.honest and not any(v.verdict == "undecided" for v in self.verdicts)


def decide(cohorts: Sequence[dict], settings: dict, last: bool) -> Decision:
    """Look at the cohorts of a mode, as it was planned before the first of them.

    Looks are after every LOOKS cohorts of all candidates, and at the end. They share
    out ERROR by the cube of the time (https://doi.org/10.1093/biomet/70.3.659).

    Args:
        cohorts: "turns"; "ended", the minutes in which this and all before ran; and
            "groups", in how many cohorts all candidates take part.
        settings: "minutes" planned, "base", which others are compared with first, and
            the candidates only "shown".
        last: whether no cohort follows.
    """
    every = LOOKS * cohorts[0]["groups"] if cohorts else 1
    planned = len(cohorts) // every * every
    times = [one["ended"] / settings["minutes"] for one in cohorts[every - 1 :: every]]
    if last and cohorts:
        times = [*times[: (len(cohorts) - 1) // every], 1.0]
        planned = len(cohorts)
    if not times:
        return Decision([], [], None)
    before, now = (min(1, time) ** 3 for time in [0.0, *times][-2:])
    error = ERROR * (now - before)
    cells = [levels(one, settings["shown"]) for one in cohorts[:planned]]
    fit = Fit(cells)
    names = [name for name in fit.names if not name.endswith(AGAIN)]
    names.sort(key=lambda name: name != settings["base"])
    pairs = [(other, one) for n, one in enumerate(names) for other in names[n + 1 :]]
    copies = [(n, n.removesuffix(AGAIN)) for n in fit.names if n.endswith(AGAIN)]
    copies = [pair for pair in copies if pair[1] in names]
    return Decision(judge(fit, pairs, error), judge(fit, copies, error), fit)
