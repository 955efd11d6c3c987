"""Whether the timings can be trusted: run these on an idle machine, unattended.

    python -m timings.trial copies [SESSIONS] [COHORTS]   # 10 x 9, 2 hours on two cores
    python -m timings.trial power                         # 10, 10, 10 and 30 minutes

copies: three copies of distributed, in place of three strategies, and one that sleeps
for 5 % of each step. No verdict on two copies is right; the slow one has to be found.
power: how wide intervals are, and whether verdicts of several runs contradict each other.
Interrupted, both continue. They write results/timings_copies.json and timings_power.json.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from itertools import combinations
from pathlib import Path

from common.log import commit
from launch.exits import exit_status
from timings import plan, report
from timings.measure import ROOT, cohort
from timings.statistics import AGAIN, decide

SLOW = '''"""distributed.py, of which each step takes 5 % longer."""
import time

import distributed
from distributed import *

step = distributed.train_step


def slow_step(*arguments):
    began = time.perf_counter()
    result = step(*arguments)
    time.sleep(0.05 * (time.perf_counter() - began))
    return result


distributed.train_step = slow_step
if __name__ == "__main__":
    with exit_status():
        main(distributed.arguments())
'''
COPIES = ("distributed", "second copy", "third copy")


def candidates(args: argparse.Namespace, slow: Path) -> list:
    """The copies, the one that A/A compares, and the slow one."""
    names = (*COPIES, "distributed" + AGAIN, "slow")
    found = [plan.candidate(args, "distributed", "synthetic", name) for name in names]
    slowed = {**found[-1].variables, "SCRIPT": str(slow)}
    return [*found[:-1], found[-1]._replace(variables=slowed)]


def copies(sessions: int = 10, cohorts: int = 9) -> None:
    """Measure, judge each session, and write what came out."""
    folder = ROOT / "runs" / "timings-copies"
    folder.mkdir(parents=True, exist_ok=True)
    slow, file = folder / "slow.py", folder / "cohorts.jsonl"
    slow.write_text(SLOW)
    args = plan.parse([])
    done = report.read_cohorts(folder)
    while len(done) < sessions * cohorts:
        done.append(cohort(candidates(args, slow), random.Random()))
        with file.open("a") as lines:
            lines.write(json.dumps(done[-1]) + "\n")
        print(f"{len(done)} of {sessions * cohorts}", done[-1]["problems"], flush=True)
    rows, settings = [], {"minutes": 1, "base": COPIES[0], "shown": []}
    for session in range(sessions):
        part = done[session * cohorts : (session + 1) * cohorts]
        part = [
            one | {"ended": (n + 1) / cohorts, "groups": 1}
            for n, one in enumerate(part)
        ]
        decision = decide(part, settings, last=True)
        judged = {one.pair: one for one in decision.verdicts}
        same = [v for v in judged.values() if "slow" not in v.pair]
        rows.append(
            {
                "minutes": sum(one["seconds"] for one in part) / 60,
                "comparisons": len(same),
                "false": sum(v.verdict in ("faster", "slower") for v in same),
                "honest": decision.honest,
                "found": judged["slow", COPIES[0]].verdict == "slower",
                "verdicts": [v._asdict() for v in judged.values()],
                "copies": [v._asdict() for v in decision.copies],
            }
        )
    sums = ("comparisons", "false", "honest", "found")
    totals = {name: sum(one[name] for one in rows) for name in sums}
    write("copies", {"sessions": sessions, **totals, "rows": rows})


def power() -> None:
    """Run the command, three times for ten minutes and once for thirty."""
    rows = []
    for number, minutes in enumerate((10, 10, 10, 30), start=1):
        folder = ROOT / "runs" / f"timings-power-{number}"
        words = [sys.executable, "-m", "timings", "--minutes", str(minutes)]
        subprocess.run([*words, "--output", str(folder)], cwd=ROOT, check=True)
        found = json.loads((folder / "report.json").read_text())
        names = ("minutes", "half_widths", "headline", "verdicts", "copies")
        rows.append({"planned": minutes, **{name: found[name] for name in names}})
    verdicts: dict[tuple, list[dict]] = {}
    for row in rows:
        for one in row["verdicts"]:
            if one["verdict"] != "undecided":
                verdicts.setdefault((*one["pair"], one["mode"]), []).append(one)
    apart = [
        " : ".join(pair)
        for pair, found in verdicts.items()
        for one, other in combinations(found, 2)
        if one["verdict"] != other["verdict"]
        and (one["low"] > other["high"] or other["low"] > one["high"])
    ]
    write("power", {"contradictions": apart, "rows": rows})


def write(name: str, found: dict) -> None:
    """Write results/timings_NAME.json."""
    found = {"argv": ["python", "-m", "timings.trial", name], **found}
    found |= {"commit": commit(), **report.machine("cpu")}
    path = ROOT / "results" / f"timings_{name}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    with exit_status():
        os.environ.setdefault("PYTHON", sys.executable)
        {"copies": copies, "power": power}[sys.argv[1]](*map(int, sys.argv[2:]))
