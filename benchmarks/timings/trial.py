"""Measure how far the timings can be trusted.

    python -m benchmarks.timings.trial simulation [DRAWS]
    python -m benchmarks.timings.trial copies [SESSIONS] [COHORTS]
    python -m benchmarks.timings.trial power [SESSIONS]

simulation (3 minutes; 2,000 sessions per row): the analysis of simulated turns whose
true speeds are known. copies (50 minutes; 10 sessions of 4 cohorts): four copies of
distributed, none of which is faster than another, and one that sleeps for 5 % of each
step and has to be found. power (3 sessions of ten minutes): how wide intervals are, and
whether sessions contradict each other. The last two need an idle machine; if they are
interrupted, they continue. Each writes benchmarks/results/timings_NAME.json.
"""

import json
import math
import os
import random
import statistics
import subprocess
import sys

from benchmarks.comparison import RESULTS, ROOT, commit
from benchmarks.timings import options, plan, report
from benchmarks.timings.measure import cohort
from benchmarks.timings.statistics import AGAIN, decide, orders
from common.errors import one_line_errors

NAMES = ("distributed", "second copy", "third copy", "distributed" + AGAIN)
SETTINGS = {"minutes": 1, "base": "distributed", "shown": []}
NOISE, DRIFT = 0.03, 0.02  # of an interval; of the machine's speed from turn to turn
# Share of turns that are longer, and by how much on average
DISTURBED, DELAY = 0.3, 0.1
SLOW = '''"""distributed.py, with steps that take 5 % longer."""
import time

import distributed

first, last, began = distributed.seed_generators, distributed.batch_sums, 0.0


def begin(*key):
    global began
    began = time.perf_counter()
    first(*key)


def end(*tensors):
    time.sleep(0.05 * (time.perf_counter() - began))
    return last(*tensors)


distributed.seed_generators, distributed.batch_sums = begin, end
distributed.main(distributed.arguments())
'''


def invented(truth: dict[str, float], launch: float, blocks: int, seed: str) -> dict:
    """Return a cohort like measure.cohort()'s, from logs of seconds per image.

    `launch` is the standard deviation of what each launch adds to the logs.
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
    wrong, silent, halves, verdicts = 0, 0, [], []
    for draw in range(draws):
        found: list[dict] = []
        for number in range(1, cohorts + 1):
            found.append(invented(truth, launch, 8, f"{draw} {number}"))
            found[-1]["ended"] = number / cohorts
            decision = decide(found, SETTINGS, last=number == cohorts)
            if decision.over:
                break
        if not decision.honest:
            silent += 1
            continue
        halves.append(max(math.sqrt(v.high / v.low) - 1 for v in decision.verdicts))
        logs = [truth[v.pair[1]] - truth[v.pair[0]] for v in decision.verdicts]
        right = [
            {"faster": log > 0, "slower": log < 0, "equal": abs(log) <= math.log(1.03)}
            for log in logs
        ]
        found_here = [v.verdict for v in decision.verdicts]
        wrong += not all(r.get(v, True) for r, v in zip(right, found_here, strict=True))
        verdicts += found_here
    return {
        "third_is_slower_by": slower,
        "launch_effect": launch,
        "cohorts": cohorts,
        "sessions": draws,
        "with_a_wrong_verdict": wrong / draws,
        "without_verdicts": silent / draws,
        "half_width": statistics.median(halves),
        "decided": 1 - verdicts.count("undecided") / len(verdicts),
    }


def simulation(draws: int = 2000) -> None:
    """Measure error rates with known speeds, drift and varying launches."""
    rows = []
    for slower in (0.0, 0.0301, 0.05):
        for launch in (0.0, 0.01, 0.02):
            rows.append(simulated(slower, launch, 6, draws))
            print(rows[-1], flush=True)
    noise = {"interval_noise": NOISE, "drift": DRIFT}
    noise |= {"disturbed_turns": DISTURBED, "delay": DELAY}
    write("simulation", {**noise, "rows": rows})


def copies(sessions: int = 10, cohorts: int = 4) -> None:
    """Measure copies of one script, and judge them as if they were strategies."""
    folder = ROOT / "runs" / "timings-copies"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "slow.py").write_text(SLOW)
    args, done = options.parse([]), report.read_cohorts(folder)
    plan.complete(args)
    every = [plan.candidate(args, "distributed", "synthetic", name) for name in NAMES]
    words = ["torchrun", "--standalone", "--nproc-per-node", str(args.processes)]
    words += [str(folder / "slow.py"), *every[0].command[2:]]
    every.append(every[0]._replace(name="slow", command=words))
    while len(done) < sessions * cohorts:
        done.append(cohort(every))
        with (folder / "cohorts.jsonl").open("a") as lines:
            lines.write(json.dumps(done[-1]) + "\n")
        print(f"{len(done)} of {sessions * cohorts}", done[-1]["problems"], flush=True)
    rows = []
    for session in range(sessions):
        part = done[session * cohorts : (session + 1) * cohorts]
        minutes = sum(one["seconds"] for one in part) / 60
        part = [c | {"ended": n / cohorts} for n, c in enumerate(part, 1)]
        decision = decide(part, SETTINGS, last=True)
        judged = (*decision.verdicts, *decision.copies)
        same = [v for v in judged if "slow" not in v.pair]
        row = {"minutes": minutes, "comparisons": len(same)}
        row["false"] = sum(v.verdict in ("faster", "slower") for v in same)
        slow_pair = next(v for v in decision.verdicts if v.pair == ("slow", NAMES[0]))
        row |= {"honest": decision.honest, "found": slow_pair.verdict == "slower"}
        rows.append({**row, "verdicts": [v._asdict() for v in judged]})
    names = ("comparisons", "false", "honest", "found")
    write("copies", {n: sum(row[n] for row in rows) for n in names} | {"rows": rows})


def power(sessions: int = 3) -> None:
    """Run the command several times, then judge all cohorts as one longer session."""
    rows, decided, together, settings = [], {}, [], {}
    for number in range(sessions):
        folder = ROOT / "runs" / f"timings-power-{number + 1}"
        words = [sys.executable, "-m", "benchmarks.timings", "--output", str(folder)]
        subprocess.run(words, cwd=ROOT, check=True)
        rows.append(json.loads((folder / "report.json").read_text()))
        for one in rows[-1]["verdicts"]:
            if one["verdict"] != "undecided":
                decided.setdefault((one["mode"], *one["pair"]), []).append(one)
        settings = rows[-1]["settings"]
        offset = number * settings["minutes"]
        for one in report.read_cohorts(folder):
            together.append(one | {"ended": offset + one["ended"]})
    apart = [
        pair
        for pair, found in decided.items()
        if max(one["low"] for one in found) > min(one["high"] for one in found)
    ]
    settings = settings | {"minutes": sessions * settings["minutes"]}
    halves = {}
    for mode in settings["modes"]:
        of_mode = [one for one in together if one["mode"] == mode]
        halves[mode] = report.Mode(mode, of_mode, settings, last=True).half_width
    widths = [{"minutes": row["minutes"], **row["half_widths"]} for row in rows]
    widths.append({"minutes": sum(row["minutes"] for row in rows), **halves})
    write("power", {"contradictions": apart, "half_widths": widths, "rows": rows})


def write(name: str, found: dict) -> None:
    """Write benchmarks/results/timings_NAME.json."""
    about = {"argv": ["python", "-m", "benchmarks.timings.trial", *sys.argv[1:]]}
    about |= {"commit": commit(), **report.machine("cpu")}
    path = RESULTS / f"timings_{name}.json"
    path.write_text(json.dumps(about | found, indent=1) + "\n")


if __name__ == "__main__":
    with one_line_errors():
        os.environ.setdefault("PYTHON", sys.executable)
        commands = {one.__name__: one for one in (simulation, copies, power)}
        commands[sys.argv[1]](*map(int, sys.argv[2:]))
