"""Derives verdicts from several cohorts, with a bounded chance of error.

Two launches of one candidate differ in speed, however long you measure. A launch
therefore counts as one sample: the comparison uses one number per candidate and cohort,
not single intervals.
"""

import math
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy
from scipy import stats

AGAIN = " again"  # suffix of the name of a candidate's second copy
ERROR = 0.02  # limit for the chance of any wrong verdict in a mode
MARGIN = math.log(1.03)  # smaller differences count as equal
LOOKS = 2  # cohorts between interim analyses, which may end a mode early


class Verdict(NamedTuple):
    """The ratio of two candidates' speeds, its confidence interval and the verdict."""

    pair: tuple[str, str]
    verdict: str  # faster, slower, equal or undecided
    ratio: float
    low: float
    high: float


def williams(number: int) -> list[list[int]]:
    """Return orders of `number` items; each item follows every other one equally often.

    Source: Williams 1949, https://doi.org/10.1071/CH9490149
    """
    first = [n // 2 if n % 2 == 0 else number - (n + 1) // 2 for n in range(number)]
    rows = [[(n + shift) % number for n in first] for shift in range(number)]
    return rows if number % 2 == 0 else rows + [row[::-1] for row in rows]


def orders(names: Sequence[str], draw: random.Random) -> Iterator[list[str]]:
    """Yield an order of `names` for every round, from shuffled williams() orders."""
    names = draw.sample(names, len(names))
    while True:
        rows = williams(len(names))
        for row in draw.sample(rows, len(rows)):
            yield [names[n] for n in row]


def levels(cohort: dict, alone: Sequence[str] = ()) -> dict[str, float]:
    """Return each candidate's log(seconds per image) in a cohort, by median polish.

    A slowdown of the machine affects all candidates' nth turns equally, except those of
    candidates that run `alone`. A turn begins with a name and seconds per image.

    Source: https://en.wikipedia.org/wiki/Median_polish
    """
    logs: dict[str, list[float]] = {}
    for name, intervals, *_ in cohort["turns"]:
        logs.setdefault(name, []).append(float(numpy.mean(numpy.log(intervals))))
    found = {n: float(numpy.median(logs.pop(n))) for n in alone if n in logs}
    table = numpy.array([*zip(*logs.values(), strict=False)])  # (turns, candidates)
    slowness = numpy.zeros((len(table), 1))
    for _ in range(10 if logs else 0):
        level = numpy.median(table - slowness, axis=0)
        slowness = numpy.median(table - level, axis=1, keepdims=True)
        slowness -= numpy.median(slowness)
        found |= zip(logs, level.tolist(), strict=True)
    return found


class Fit:
    """Least-squares fit of log(seconds per image) = cohort effect + candidate effect.

    A cohort may lack candidates. If none does, C cohorts of k candidates form a
    two-way table, whose residuals have (C - 1)(k - 1) degrees of freedom.
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
        self.variance = (
            residuals @ residuals / self.freedom if self.freedom else math.inf
        )

    def compare(self, one: str, other: str) -> tuple[float, float]:
        """Return log(speed of `one` / speed of `other`) and its standard error.

        Two copies of a candidate count as one, whose effect is their mean effect.
        """
        weights = numpy.zeros(len(self.names))
        for name, sign in ((other, 1), (one, -1)):
            copies = [name, name + AGAIN] if name + AGAIN in self.names else [name]
            if name + AGAIN in (one, other):  # the two copies are compared
                copies = [name]
            for copy in copies:
                weights[self.names.index(copy)] += sign / len(copies)
        error = math.sqrt(self.variance * (weights @ self.covariance @ weights))
        return float(weights @ self.effects), error


def judge(fit: Fit, pairs: Sequence[tuple[str, str]], error: float) -> list[Verdict]:
    """Judge pairs; the chance that any verdict is wrong is at most `error` (Holm).

    Source: https://en.wikipedia.org/wiki/Holm%E2%80%93Bonferroni_method
    """
    compared = {pair: fit.compare(*pair) for pair in pairs}
    left, found = len(pairs), {}
    for pair in sorted(pairs, key=lambda p: -abs(compared[p][0]) / compared[p][1]):
        log, standard_error = compared[pair]
        half = math.inf  # with a single cohort, or too few degrees of freedom
        if fit.freedom:
            wide = stats.t.ppf(1 - error / left / 2, fit.freedom) * standard_error
            half = wide if wide < 99 else math.inf
        if abs(log) + half < MARGIN:  # two one-sided tests
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
    """The verdicts of one analysis of a mode's cohorts."""

    verdicts: list[Verdict]
    copies: list[Verdict]  # on a candidate and its second copy
    fit: Fit | None

    @property
    def honest(self) -> bool:
        """Whether a candidate's two copies do not differ significantly."""
        return bool(self.copies) and all(v.low <= 1 <= v.high for v in self.copies)

    @property
    def over(self) -> bool:
        """Whether every pair is decided."""
        return self.honest and not any(v.verdict == "undecided" for v in self.verdicts)


def decide(cohorts: Sequence[dict], settings: dict, last: bool) -> Decision:
    """Judge a mode's cohorts at the latest planned analysis.

    Analyses are planned after every LOOKS cohorts, and after the last cohort. Each may
    use a part of ERROR; the sum of these parts grows with the cube of elapsed time
    (https://doi.org/10.1093/biomet/70.3.659).

    Args:
        cohorts: dicts with "turns" and "ended", the cohort's end in minutes.
        settings: "minutes", the planned time; "base", the candidate that is compared
            with the others first; and "shown", the candidates that get no verdicts.
        last: whether no cohort follows.
    """
    planned = len(cohorts) // LOOKS * LOOKS
    times = [one["ended"] / settings["minutes"] for one in cohorts[LOOKS - 1 :: LOOKS]]
    if last and cohorts:
        times = [*times[: (len(cohorts) - 1) // LOOKS], 1.0]
        planned = len(cohorts)
    if not times:
        return Decision([], [], None)
    before, now = (min(1, time) ** 3 for time in [0.0, *times][-2:])
    error = ERROR * (now - before)
    shown = settings["shown"]
    found = [levels(one, shown).items() for one in cohorts[:planned]]
    fit = Fit([{n: level for n, level in one if n not in shown} for one in found])
    names = [name for name in fit.names if not name.endswith(AGAIN)]
    names.sort(key=lambda name: name != settings["base"])
    pairs = [(other, one) for n, one in enumerate(names) for other in names[n + 1 :]]
    copies = [(n, n.removesuffix(AGAIN)) for n in fit.names if n.endswith(AGAIN)]
    copies = [pair for pair in copies if pair[1] in names]
    return Decision(judge(fit, pairs, error), judge(fit, copies, error), fit)
