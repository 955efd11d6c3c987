"""Run every strategy on a real GPU, compare what comes out, and time it.

    bash scripts/gpu_check.sh [--output DIR] [--minutes N] [--rows WORD ...]
    bash scripts/gpu_check.sh --rehearse    # the same code on a CPU, at tiny sizes

A row is one thing that is tried, in processes of its own with a time limit: it passed,
failed, is not available here (and why), or was not run. Rows come in the order of their
importance; what does not fit into the time is not run, and the same command goes on
with it, and tries again what failed. One JSON file for each kind of row and summary.md
go to results/GPU_DATE. A rehearsal says in every row and file that it is one.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gpu_rows import (
    DATA,
    IMAGES,
    LOSS_TOLERANCE,
    Failed,
    Launcher,
    Machine,
    Row,
    Setting,
    horovod_version,
    judge_agreement,
    rows,
)
from quickstart import ROOT, aligned
from timings import keep, machine

from benchmarks.photographs import write_photographs
from common.arguments import OneLineParser
from common.device import describe, usable_gpus
from common.errors import UserError, exit_status
from common.report import commit

REHEARSED = "rehearsed on a CPU"
RESERVE = 10  # seconds to end and to write the summary
TITLES = {
    "training": "Training (fp32 without TF32, so that curves can be compared)",
    "agreement": "One training run, whatever the strategy and the device",
    "input": "What reaches the network",
    "resume": "Stopped and resumed",
    "speed": "Scripts against a bare loop, random images on the device",
    "model": "ResNet-50, bf16, channels_last: share of the matrix rate",
    "timings": "One launch of each strategy, as scripts/timings.sh makes it",
}
VERSIONS = ("torch", "torchvision", "cuda", "nccl", "horovod", "apex", "python", "cpu")
STATUSES = ("passed", "failed", "not available", "not run")


def facts_of(here: Machine) -> dict:
    """What the results were made with."""
    device = REHEARSED if here.rehearse else describe_gpu()
    facts = machine("cuda" if device and not here.rehearse else "cpu")
    if facts["apex"] is None and importlib.util.find_spec("apex"):
        facts["apex"] = "(sources without a version)"
    return {
        "device": device or None,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "sources": digest_of_sources(),
        "machine": facts,
    }


def digest_of_sources() -> str:
    """Stands for the code, where files differ from their commit or git is missing."""
    digest = hashlib.blake2b(digest_size=8)
    folders = (ROOT, ROOT / "common", ROOT / "scripts", ROOT / "benchmarks")
    for file in sorted(
        path for folder in folders for path in folder.glob("*.[ps][yh]")
    ):
        digest.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def describe_gpu() -> str:
    """The GPU's name, as its maker says it; "" without one."""
    return describe(torch.device("cuda", 0)) if usable_gpus() else ""


class Check:
    """Tries rows, and writes down what came out after each of them."""

    def __init__(self, output: Path, here: Machine, every: list[Row], seconds: float):
        """Go on with what is in `output`.

        Raises:
            UserError: it holds the results of other sources or another machine.
        """
        self.output, self.here = output, here
        self.deadline = time.monotonic() + seconds
        self.facts = facts_of(here)
        self.lock = threading.Lock()
        self.stopped = False
        self.running: list[Launcher] = []
        self.results = {
            (row.group, row.name): not_tried(row, "not run", "not asked for")
            for row in every
        }
        for group, content in read(output).items():
            for name in ("device", "sources"):
                if content[name] != self.facts[name]:
                    raise UserError(
                        f"{output} holds results of {name} {content[name]}, now it is "
                        f"{self.facts[name]}: choose another --output, or delete it"
                    )
            for result in content["rows"]:
                key = group, result["row"]
                if key in self.results and result["status"] in STATUSES[:2]:
                    self.results[key] = result

    def run(self, wanted: list[Row]) -> None:
        """Try rows in their order; those that are not timed run some at a time."""
        at_once = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
        missing = [row for row in wanted if self.result(row)["status"] != "passed"]
        for row in missing:
            self.keep(row, not_tried(row, "not run", "interrupted"))
        for alone, some in groupby(missing, key=lambda row: row.alone):
            with ThreadPoolExecutor(1 if alone else at_once) as pool:
                try:
                    list(pool.map(self.one, some))
                except KeyboardInterrupt:
                    self.stopped = True
                    for launch in list(self.running):
                        launch.end()
                    raise

    def result(self, row: Row) -> dict:
        """What is known of a row."""
        return self.results[row.group, row.name]

    def keep(self, row: Row, result: dict) -> None:
        """Remember what came out; a failure until the row is really tried again."""
        if self.result(row)["status"] != "failed" or result["status"] in STATUSES[:2]:
            self.results[row.group, row.name] = result

    def one(self, row: Row) -> None:
        """Try a row, unless it cannot be had or time is up."""
        if self.stopped:
            return
        reason = row.missing()
        left = self.deadline - time.monotonic()
        if reason:
            result = not_tried(row, "not available", reason)
        elif left < 5:
            result = not_tried(row, "not run", "time is up")
        else:
            result = self.tried(row, left)
        with self.lock:
            self.keep(row, result)
            if self.here.gpu() is None:
                self.write()
                text = f"{row.group}: {row.name}: {result['status']}: {result['line']}"
                print(f"{result['seconds']:5.0f} s  {text}", flush=True)

    def tried(self, row: Row, left: float) -> dict:
        """Do the work of a row within its limit."""
        began = time.monotonic()
        launch = Launcher(min(row.limit, left))
        self.running.append(launch)
        status, found, log = "passed", {}, None
        try:
            found = row.work(launch)
            line = found.pop("line")
        except Exception as error:
            status, line, log = "failed", str(error), launch.logs()
            if not isinstance(error, Failed):
                line = f"{type(error).__name__}: {error}"
            if self.stopped:
                status, line = "not run", "interrupted"
            elif launch.over and left < row.limit:
                status, line = "not run", f"time is up, {left:.0f} s were not enough"
            elif launch.over:
                line = f"not done within its limit of {row.limit} s, ended"
        finally:
            self.running.remove(launch)
            launch.close()
        return {
            "row": row.name,
            "status": status,
            "line": line,
            "seconds": time.monotonic() - began,
            "device": found.get("ran on") or self.facts["device"],
            "commands": [" ".join(command) for command in launch.commands],
            "log": log,
            "found": found,
        }

    def write(self) -> None:
        """Write the JSON files and summary.md."""
        self.facts["machine"]["horovod"] = horovod_version()
        self.output.mkdir(parents=True, exist_ok=True)
        trained = [
            result["found"]
            for (group, _), result in self.results.items()
            if result["status"] == "passed" and "curve" in result["found"]
        ]
        groups: dict[str, list[dict]] = {"agreement": agreements(trained)}
        for (group, _), result in self.results.items():
            groups.setdefault(group, []).append(result)
        for result in groups["agreement"]:
            result["device"] = self.facts["device"]
            if self.here.gpu():
                result |= {"status": "not available", "line": self.here.gpu()}
        for group, results in groups.items():
            keep(self.output / f"{group}.json", {**self.facts, "rows": results})
        (self.output / "summary.md").write_text(summary(self.output))


def not_tried(row: Row, status: str, line: str) -> dict:
    """The result of a row that was not tried."""
    return {"row": row.name, "status": status, "line": line, "seconds": 0.0}


def agreements(trained: list[dict]) -> list[dict]:
    """Compare all curves of one number of processes and one precision."""
    results = []
    for processes, precision in product((1, 2), LOSS_TOLERANCE):
        references, runs = [], {}
        for found in trained:
            setting = Setting(**found["setting"])
            if setting.processes != processes:
                continue
            if found.get("reference"):
                references.append(found)
            elif setting.computes == precision and found["compared"]:
                runs[setting.name] = found
        status, line, found = "not run", "a curve and the CPU's are needed", {}
        if references and runs:
            try:
                found = judge_agreement(runs, references[0], LOSS_TOLERANCE[precision])
                line = found.pop("line")
                status = "passed" if found["pairs"] else "not run"
            except Failed as failed:
                status, line = "failed", str(failed)
        name = f"{processes} process{'es' * (processes > 1)}, {precision}"
        result = {"row": name, "status": status, "line": line, "seconds": 0.0}
        results.append({**result, "found": found})
    return results


# --- what came out ---


def read(folder: Path) -> dict[str, dict]:
    """The JSON files of a folder by their names."""
    return {
        group: json.loads((folder / f"{group}.json").read_text())
        for group in TITLES
        if (folder / f"{group}.json").exists()
    }


def summary(folder: Path) -> str:
    """summary.md, from nothing but the JSON files."""
    groups = read(folder)
    facts = next(iter(groups.values()))
    every = [result for content in groups.values() for result in content["rows"]]
    counts = [f"{sum(r['status'] == s for r in every)} {s}" for s in STATUSES]
    versions = {name: facts["machine"].get(name) for name in VERSIONS}
    text = f"# {facts['device'] or 'No GPU'}\n\n{', '.join(counts)}.\n\n"
    if facts["device"] == REHEARSED:
        text += f"**{REHEARSED[0].upper()}{REHEARSED[1:]}**, at tiny sizes: "
        text += "no row of it ran on a GPU, and no speed says anything.\n\n"
    text += ", ".join(f"{name} {value}" for name, value in versions.items() if value)
    text += f"; commit {facts['commit']}, "
    text += f"digest of the sources {facts['sources']}; {facts['date']}.\n"
    for gpu in facts["machine"].get("gpus", []):
        text += f"GPU, driver, power limit, memory: {gpu}.\n"
    for group, content in groups.items():
        lines = [["row", "status", "s", "what came out"]]
        for result in content["rows"]:
            status = result["status"]
            if status in ("passed", "failed") and facts["device"] == REHEARSED:
                status += f", {REHEARSED}"
            line = result["line"].replace("|", "/")
            lines.append([result["row"], status, f"{result['seconds']:.0f}", line])
        text += f"\n## {TITLES[group]}\n\n{aligned(lines)}"
    return text


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", metavar="DIR", type=Path, help="results/GPU_DATE")
    add("--minutes", metavar="N", type=float, default=9, help="in all (%(default)s)")
    add("--rows", metavar="WORD", nargs="+", help="only rows in whose names one stands")
    add("--rehearse", action="store_true", help="on the CPU, at tiny sizes")
    args = parser.parse_args(argv)
    name = re.sub(r"[^a-z0-9]+", "-", describe_gpu().lower())
    if args.output is None:
        args.output = ROOT / "results" / f"{name}_{time.strftime('%Y-%m-%d')}"
        if args.rehearse or not name:
            kind = "rehearsal" if args.rehearse else "no-gpu"
            args.output = ROOT / "runs" / "gpu_check" / kind
    elif args.rehearse and (ROOT / "results") in args.output.resolve().parents:
        parser.error("--rehearse writes no results: choose an --output elsewhere")
    return args


def write_data() -> None:
    """Make the images that the rows train on."""
    if not DATA.exists():
        temporary = DATA.with_name(f"{DATA.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        write_photographs(temporary, train=IMAGES, val=IMAGES // 4, classes=8)
        temporary.rename(DATA)


def main() -> None:
    """Try everything that was asked for; status 1 where a row failed."""
    began = float(os.environ.get("GPU_CHECK_BEGAN") or time.time())
    args = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    here = Machine(args.rehearse)
    every = rows(here)
    wanted = [
        row
        for row in every
        if not args.rows
        or any(word in f"{row.group}: {row.name}" for word in args.rows)
    ]
    if not wanted:
        raise UserError(f"--rows {' '.join(args.rows)}: there is no such row")
    left = 60 * args.minutes - RESERVE - (time.time() - began)
    check = Check(args.output, here, every, left)
    try:
        if here.gpu() is None:
            write_data()
        check.run(wanted)
    except KeyboardInterrupt:
        check.write()
        print(f"\ninterrupted; the same command goes on: {args.output}")
        sys.exit(130)
    check.write()
    head = (args.output / "summary.md").read_text().partition("\n## ")[0]
    print(f"\n{head}\nAll rows: {args.output / 'summary.md'}")
    if here.gpu():
        print(f"Nothing was run: {here.gpu()}.")
    elif args.rehearse:
        print(f"This was {REHEARSED}: nothing ran on a GPU.")
    results = [row for content in read(args.output).values() for row in content["rows"]]
    sys.exit(any(result["status"] == "failed" for result in results))


if __name__ == "__main__":
    with exit_status():
        main()
