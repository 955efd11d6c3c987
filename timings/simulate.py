"""How often the analysis errs, on invented cohorts of which the truth is known.

    python -m timings.simulate    # 2,000 draws per row; writes results/timings_simulation.json

Four candidates, one of them twice, as on two CPU cores: cohorts of four blocks, turns of
two intervals that vary by 10 %, launches that vary by 0 to 2 %, and a machine whose speed
drifts by some percent per cohort, and steps up or down once in a while.
"""

import json
import math
import random
import sys
from collections.abc import Sequence

import numpy

from common.log import commit
from timings.measure import ROOT
from timings.statistics import AGAIN, decide, orders

NAMES = ["distributed", "mp.spawn", "horovod", "distributed" + AGAIN]
SETTINGS = {"minutes": 10, "base": "distributed", "shown": []}
LAUNCH = (0, 0.005, 0.01, 0.02)  # standard deviation of a launch
NOISE = 0.1  # of an interval
DRIFT = 0.02  # of the machine's speed, from one turn to the next


def invented(
    number: int, of: int, truth: Sequence[float], launch: float, seed: int
) -> dict:
    """A cohort as measure.cohort() returns it.

    Args:
        truth: log of each candidate's seconds per image.
    """
    draw, blocks = random.Random(seed), orders(NAMES, random.Random(seed))
    launched = {n: t + draw.gauss(0, launch) for n, t in zip(NAMES, truth, strict=True)}
    machine, slope, turns = draw.gauss(0, 0.1), draw.gauss(0, DRIFT / 4), []
    for _ in range(4):
        for name in next(blocks):
            machine += slope + draw.gauss(0, DRIFT)
            level = launched[name] + machine
            noise = [math.exp(level + draw.gauss(0, NOISE)) for _ in range(2)]
            turns.append([name, noise])
    ended = SETTINGS["minutes"] * (number + 1) / of
    return {"turns": turns, "ended": ended, "groups": 1}


def row(truth: Sequence[float], cohorts: int, launch: float, draws: int) -> dict:
    """Error rates, and what was found, over sessions that may end at a look."""
    wrong = refused = 0
    kinds = dict.fromkeys(("faster", "slower", "equal", "undecided"), 0)
    halves = []
    times = dict(zip(NAMES, truth, strict=True))
    for draw in range(draws):
        found: list[dict] = []
        for number in range(cohorts):
            seed = draw * 1000 + number
            found.append(invented(number, cohorts, truth, launch, seed))
            last = number + 1 == cohorts
            decision = decide(found, SETTINGS, last)
            if decision.over:
                break
        if not decision.honest:
            refused += 1
            continue
        errs = False
        for verdict in decision.verdicts:
            log = times[verdict.pair[1]] - times[verdict.pair[0]]
            right = {"faster": log > 0, "slower": log < 0, "undecided": True}
            right["equal"] = abs(log) <= math.log(1.03)
            errs |= not right[verdict.verdict]
            kinds[verdict.verdict] += 1
            halves.append(math.sqrt(verdict.high / verdict.low) - 1)
        wrong += errs
    return {
        "cohorts": cohorts,
        "launch_effect": launch,
        "slower_by": [round(math.expm1(log), 3) for log in truth[:3]],
        "sessions": draws,
        "with_a_wrong_verdict": wrong / draws,
        "without_verdicts": refused / draws,
        "half_width": float(numpy.median(halves)),
        **{kind: number / len(halves) for kind, number in kinds.items()},
    }


def main(draws: int = 2000) -> None:
    """Write results/timings_simulation.json."""
    five, three = math.log(1.05), math.log(1.0301)
    truths = ([0.0] * 4, [0.0, 0.0, five, 0.0], [0.0, 0.0, three, 0.0])
    rows = []
    for truth in truths:
        for cohorts in (5, 10):
            for launch in LAUNCH:
                rows.append(row(truth, cohorts, launch, draws))
                print(rows[-1], flush=True)
    found = {"argv": ["python", "-m", "timings.simulate"], "commit": commit()}
    found |= {"interval_noise": NOISE, "drift_per_turn": DRIFT, "rows": rows}
    path = ROOT / "results" / "timings_simulation.json"
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
