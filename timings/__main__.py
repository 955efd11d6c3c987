"""Compare the strategies by turns, and report what was decided."""

import argparse
import contextlib
import json
import os
import signal
import sys
import time

from common.errors import UserError
from common.log import commit
from launch.exits import exit_status
from timings import plan, report
from timings.measure import Candidate, cohort
from timings.statistics import decide

SETTINGS = ("minutes", "modes", "strategies", "processes", "threads", "workers")
SETTINGS += ("arch", "image_size", "batch_size", "precision", "device", "base", "shown")


def open_output(args: argparse.Namespace) -> list[dict]:
    """Make the folder, or read the cohorts that an earlier command has left there.

    Raises:
        UserError: they were measured with other settings.
    """
    now = {name: getattr(args, name) for name in SETTINGS}
    now |= {"data": str(args.data), "commit": commit(), **report.machine(args.device)}
    now = json.loads(json.dumps(now))
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / "settings.json"
    before = json.loads(file.read_text()) if file.exists() else now
    for name, value in now.items():
        if before.get(name) != value:
            raise UserError(
                f"{args.output} holds timings with {name} {before.get(name)}, now it "
                f"is {value}: choose another --output, or delete it"
            )
    file.write_text(json.dumps(now, indent=1) + "\n")
    return report.read_cohorts(args.output)


class Session:
    """The cohorts of all modes, those of an interrupted command included."""

    def __init__(self, args: argparse.Namespace, cohorts: list[dict]):
        """Continue after `cohorts`."""
        self.args, self.cohorts = args, cohorts
        used = cohorts[-1]["ended"] if cohorts else 0.0
        self.began = time.monotonic() - 60 * used
        self.groups: dict[str, list[list[Candidate]]] = {}

    def minutes(self) -> float:
        """Minutes in which this command ran, and the one that it continues."""
        return (time.monotonic() - self.began) / 60

    def of(self, mode: str) -> list[dict]:
        """The cohorts of a mode."""
        return [one for one in self.cohorts if one["mode"] == mode]

    def problems(self) -> dict[str, str]:
        """Why candidates no longer take part."""
        found = {n: text for one in self.cohorts for n, text in one["problems"].items()}
        if text := os.environ.get("HOROVOD_PROBLEM"):  # of scripts/setup.sh
            found["horovod_distributed"] = text
        return found

    def next_mode(self) -> str | None:
        """The mode with the fewest cohorts, unless all is decided or time is over."""
        settings = vars(self.args)
        left = [
            mode
            for mode in self.args.modes
            if mode == "scaling" or not decide(self.of(mode), settings, last=False).over
        ]
        mode = min(left, key=lambda mode: len(self.of(mode)), default=None)
        longest = max((one["seconds"] for one in self.of(mode)), default=0.0)
        late = longest and self.minutes() + longest / 60 > self.args.minutes
        return None if late else mode

    def measure(self, mode: str) -> None:
        """Add one cohort.

        Raises:
            UserError: no candidate could be timed.
        """
        args, number, problems = self.args, len(self.of(mode)), self.problems()
        if mode not in self.groups:
            self.groups[mode] = plan.groups(args, mode)
        group = self.groups[mode][number % len(self.groups[mode])]
        absent = {*problems, *(args.shown if number else ())}
        found = cohort(
            [one for one in group if one.name not in absent], after_turn=plan.gpus
        )
        found |= {"mode": mode, "groups": len(self.groups[mode])}
        found |= {"problems": problems | found["problems"], "ended": self.minutes()}
        if not found["turns"]:
            texts = "; ".join(dict.fromkeys(found["problems"].values()))
            raise UserError(f"nothing is left to be timed: {texts}")
        self.cohorts.append(found)
        with (args.output / "cohorts.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(
            f"{self.minutes():5.1f} min: {mode}, cohort {number + 1}: started in "
            f"{found['start_seconds']:.0f} s, then {len(found['turns'])} turns",
            flush=True,
        )


def measure(args: argparse.Namespace) -> None:
    """Measure until all is decided or the time is over."""
    session = Session(args, open_output(args))
    with contextlib.ExitStack() as stack:
        if {"jpeg", "scaling"} & {*args.modes} and session.next_mode():
            args.data = stack.enter_context(plan.images(args))
        while mode := session.next_mode():
            session.measure(mode)


def main() -> None:
    """Measure and report.

    Raises:
        UserError: of bad flags or folders, a full disk ...
    """
    args = plan.parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.setdefault("PYTHON", sys.executable)
    print(report.setting(vars(args)), flush=True)
    try:
        measure(args)
        print("\n" + report.write(args.output, last=True))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if (args.output / "cohorts.jsonl").exists():
            print("\n" + report.write(args.output, last=False))
        print("interrupted; the same command continues", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        where = error.filename or "writing"
        raise UserError(f"{where}: {error.strerror or error}") from None
    print(f"It is in {args.output}; delete that to measure again.")


if __name__ == "__main__":
    with exit_status():
        main()
