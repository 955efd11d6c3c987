"""Measures cohorts until all pairs of strategies are decided or the time is up."""

import argparse
import json
import os
import signal
import sys
import time

from benchmarks.comparison import commit
from benchmarks.timings import plan, report
from benchmarks.timings.measure import cohort
from benchmarks.timings.statistics import decide
from common.errors import UserError


def open_output(args: argparse.Namespace) -> list[dict]:
    """Create the output folder; return the cohorts that an earlier command measured.

    Raises UserError if that command had different settings.
    """
    now = {**vars(args), "commit": commit(), **report.machine(args.device)}
    now = json.loads(json.dumps(now, default=str))
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / "settings.json"
    before = json.loads(file.read_text()) if file.exists() else now
    for name, value in now.items():
        if before.get(name) != value:
            raise UserError(
                f"{args.output} contains timings with {name} {before.get(name)}, not "
                f"{value}: choose another --output, or delete it"
            )
    file.write_text(json.dumps(now, indent=1) + "\n")
    return report.read_cohorts(args.output)


def next_mode(args: argparse.Namespace, cohorts: list[dict], now: float) -> str | None:
    """Return the mode with fewest cohorts; None if time is up or all are decided."""
    of = {mode: [one for one in cohorts if one["mode"] == mode] for mode in args.modes}
    for mode, found in [*of.items()]:
        if mode != "scaling" and decide(found, vars(args), last=False).over:
            del of[mode]
    mode = min(of, key=lambda mode: len(of[mode]), default=None)
    longest = max((one["seconds"] for one in of.get(mode, ())), default=0.0)
    return None if longest and now + longest / 60 > args.minutes else mode


def measure(args: argparse.Namespace) -> None:
    """Measure cohorts until all pairs are decided or the time is up.

    Raises UserError if any mode has no strategy that can be timed.
    """
    cohorts = open_output(args)
    began = time.monotonic() - 60 * (cohorts[-1]["ended"] if cohorts else 0)
    with plan.images(args) as args.data:
        while mode := next_mode(args, cohorts, (time.monotonic() - began) / 60):
            before = [one for one in cohorts if one["mode"] == mode]
            failed = {name for one in before for name in one["problems"]}
            every = [c for c in plan.candidates(args, mode) if c.name not in failed]
            shown = [one for one in every if one.name in args.shown]
            together = [one for one in every if one not in shown]
            found = cohort(together)
            if shown and not before:  # run them alone: they would disturb the others
                alone = cohort(shown, seconds=10)
                found["turns"] += alone["turns"]
                found["problems"] |= alone["problems"]
            for name, problem in found["problems"].items():
                print(f"{mode}: {name} is left out: {problem}", flush=True)
            if not found["turns"]:
                raise UserError(f"{mode}: there is no strategy left to time")
            minutes = (time.monotonic() - began) / 60
            found |= {"mode": mode, "ended": minutes}
            cohorts.append(found)
            with (args.output / "cohorts.jsonl").open("a") as file:
                file.write(json.dumps(found) + "\n")
            text = f"{mode}, cohort {len(before) + 1}: {len(found['turns'])} turns"
            print(f"{minutes:5.1f} min: {text}", flush=True)


def run(args: argparse.Namespace) -> None:
    """Measure and report; raise UserError if measuring cannot start or continue."""
    plan.complete(args)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.setdefault("PYTHON", sys.executable)
    print(report.setting(vars(args)))
    for name, why in args.skipped.items():
        print(f"{name} is left out: {why}")
    file = args.output / "report.md"
    print(f"Within {args.minutes:g} minutes: {file}\n", flush=True)
    last = False
    try:
        measure(args)
        last = True
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("interrupted; run the same command to continue", file=sys.stderr)
        sys.exit(130)
    finally:
        if (args.output / "cohorts.jsonl").exists():
            print("\n" + report.write(args.output, last))
            print(f"This report is {file}; delete {args.output} to measure again.")
