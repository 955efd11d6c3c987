"""The command `python -m doctor -- COMMAND...`, which pip installs as ddp-doctor."""

import argparse
import difflib
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from . import laws  # noqa: F401  their checks
from .cpu import NOT_CHECKED
from .html import html
from .job import Job
from .law import CHECKS, WRONG, Report, examine
from .laws.time import time_table
from .page import explanation, page, program
from .run import run


def arguments() -> argparse.Namespace:
    """Parse the command line; everything after -- is the command to watch."""
    name = program()
    text = "Run a data-parallel training command and report what is wrong."
    parser = argparse.ArgumentParser(name, f"{name} [options] -- COMMAND...", text)
    parser.epilog = (
        "Exit status: the command's; 1 if that is 0 but a finding is WRONG, or if the "
        "command hung; 2 if nothing was checked, or if an option is invalid."
    )
    add = parser.add_argument
    add("--steps", type=int, default=40, help="number of steps to watch (40)")
    add("--short", type=int, default=0, help="end each epoch after N batches")
    add("--machines", action="store_true", help="simulate one machine per process")
    text = "emulate N GPUs on the CPU (default: $LOCAL_WORLD_SIZE, or 2)"
    add("--cpu", nargs="?", const="", metavar="N", help=text)
    add("--json", type=Path, help="also write the report to a file")
    add("--html", type=Path, help="also write the report as a page with a timeline")
    add("--verbose", action="store_true", help="list every check and what it saw")
    add("--explain", metavar="CHECK", help="print what a finding means, and exit")
    add("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if args.cpu and not (args.cpu.isdigit() and int(args.cpu)):
        parser.error(f"--cpu takes a number of GPUs, not {args.cpu}")
    args.command = args.command[args.command[:1] == ["--"] :]
    if args.steps < 1 or args.short < 0:
        parser.error("--steps must be at least 1, and --short at least 0")
    for path in filter(None, (args.json, args.html)):
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            parser.error(f"cannot write {path}: give a file in an existing folder")
    if args.explain and args.explain not in CHECKS:
        near = difflib.get_close_matches(args.explain, CHECKS) or ["a finding's name"]
        text = f"no check is named {args.explain}; try {' or '.join(near)}"
        parser.error(f"--explain: {text}")
    if not args.command and not args.explain:
        parser.error("give a command after --, such as -- torchrun train.py")
    return args


def main() -> int:
    """Watch a command, and return doctor's exit status."""
    args = arguments()
    if args.explain:
        print(explanation(CHECKS[args.explain]))
        return 0
    options = {"DOCTOR_STEPS": str(args.steps), "DOCTOR_SHORT": str(args.short)}
    if args.machines:
        options["DOCTOR_MACHINES"] = "yes"
    if args.cpu is not None:
        options["DOCTOR_CPU"] = args.cpu
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        try:
            job = run(args.command, Path(folder), **options)
        except OSError as error:
            if error.filename != args.command[0]:
                raise
            text = f"cannot start {args.command[0]}: {error.strerror}"
            print(f"doctor: error: {text}", file=sys.stderr)
            return 2
    if not job.processes:
        text = "NOTHING CHECKED: no process trained or joined a process group"
        hint = "If the script fails, read its error above. If the command sets "
        hint += "PYTHONPATH, let it keep $PYTHONPATH. Without a GPU, try --cpu."
        print(f"doctor: error: {text} (status {job.status}). {hint}", file=sys.stderr)
        return status_of(job) or 2
    report = examine(job)
    print(page(job, report, args.verbose), file=sys.stderr)
    if args.cpu is not None:
        print("\n" + NOT_CHECKED, file=sys.stderr)
    if args.json:
        args.json.write_text(json.dumps(as_json(job, report), indent=1) + "\n")
    if args.html:
        args.html.write_text(html(job, report))
    if status := status_of(job):
        return status
    if any(one.level == WRONG for one in report.findings):
        return 1
    return 0 if job.watched else 2


def status_of(job: Job) -> int:
    """Return the status that a shell reports for the command, or 1 if the job hung."""
    if job.hung:
        return 1
    return job.status if job.status >= 0 else 128 - job.status


def as_json(job: Job, report: Report) -> dict:
    """Return the report for --json; report.schema.json describes its format."""
    return {
        "version": 1,
        "status": job.status,
        "hung": job.hung,
        "processes": len(job.processes),
        "world_size": job.world_size,
        "steps": job.watched,
        **asdict(report),
        "seconds": time_table(job),
    }


if __name__ == "__main__":
    sys.exit(main())
