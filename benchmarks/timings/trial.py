"""Measure with simulated turns how often the verdicts are wrong.

    python -m benchmarks.timings.trial [DRAWS]

The program simulates turns with known speeds, judges them, and writes
benchmarks/results/timings_simulation.json (2,000 sessions per row; three minutes).
"""

import math
import random
import sys

from benchmarks.comparison import write_results
from benchmarks.timings.statistics import AGAIN, LOOKS, MARGIN, decide, orders
from common.errors import one_line_errors

NAMES = ("distributed", "second copy", "third copy", "distributed" + AGAIN)
SETTINGS = {"minutes": 1, "base": "distributed", "shown": []}
NOISE, DRIFT = 0.03, 0.02  # of an interval's time; of the machine's speed per turn
DISTURBED, DELAY = 0.3, 0.1  # share of disturbed turns, and their mean delay


def invented(truth: dict[str, float], launch: float, blocks: int, seed: str) -> dict:
    """Return a simulated cohort, given each candidate's log(seconds per image).

    `launch` is the standard deviation of the offset that each launch adds to this log.
    """
    draw, order = random.Random(seed), orders([*truth], random.Random(f"{seed} too"))
    launched = {name: log + draw.gauss(0, launch) for name, log in truth.items()}
    machine, slope, turns = 0.0, draw.gauss(0, DRIFT / 4), []
    for _ in range(blocks):
        for name in next(order):
            machine += slope + draw.gauss(0, DRIFT)
            level = launched[name] + machine
            if draw.random() < DISTURBED:
                level += draw.expovariate(1 / DELAY)
            turns.append([name, [math.exp(level + draw.gauss(0, NOISE))] * 2])
    return {"turns": turns}


def simulated(slower: float, launch: float, cohorts: int, draws: int) -> dict:
    """Return error rates over sessions in which the third candidate is slower."""
    truth = dict.fromkeys(NAMES, 0.0) | {NAMES[2]: math.log1p(slower)}
    wrong, silent, verdicts = 0, 0, []
    for draw in range(draws):
        found = [invented(truth, launch, 8, f"{draw} {n + 1}") for n in range(cohorts)]
        for number, one in enumerate(found, start=1):
            one["ended"] = number / cohorts
        for number in (*range(LOOKS, cohorts, LOOKS), cohorts):  # the analyses
            decision = decide(found[:number], SETTINGS, last=number == cohorts)
            if decision.over:
                break
        if not decision.honest:
            silent += 1
            continue
        right = []
        for one in decision.verdicts:
            log = truth[one.pair[1]] - truth[one.pair[0]]
            fits = {"faster": log > 0, "slower": log < 0, "equal": abs(log) <= MARGIN}
            right.append(fits.get(one.verdict, True))
        wrong += not all(right)
        verdicts += [one.verdict for one in decision.verdicts]
    return {
        "third_is_slower_by": slower,
        "launch_effect": launch,
        "cohorts": cohorts,
        "sessions": draws,
        "with_a_wrong_verdict": wrong / draws,
        "without_verdicts": silent / draws,
        "decided": 1 - verdicts.count("undecided") / len(verdicts),
    }


def simulation(draws: int = 2000) -> None:
    """Write error rates over simulated sessions to benchmarks/results."""
    rows = []
    for slower in (0.0, 0.0301, 0.05):
        for launch in (0.0, 0.01, 0.02):
            rows.append(simulated(slower, launch, 6, draws))
            print(rows[-1], flush=True)
    argv = ["python", "-m", "benchmarks.timings.trial", *sys.argv[1:]]
    write_results("timings_simulation", {"argv": argv, "rows": rows})


if __name__ == "__main__":
    with one_line_errors():
        simulation(*map(int, sys.argv[1:]))
