"""The command: python -m doctor -- COMMAND..."""

import argparse
import json
import sys
import tempfile
import textwrap
from dataclasses import asdict
from pathlib import Path

from . import job as jobs
from .checks import Report, examine, time_table
from .cpu import NOT_CHECKED


def arguments() -> argparse.Namespace:
    """Parse the command line; everything after -- is the command to watch."""
    text = "Run a data-parallel training command and report what is wrong."
    parser = argparse.ArgumentParser("doctor", "doctor [options] -- COMMAND...", text)
    add = parser.add_argument
    add("--steps", type=int, default=40, help="steps to watch (40)")
    add("--short", type=int, default=0, help="end each epoch after N batches")
    add("--machines", action="store_true", help="simulate one machine per process")
    text = "play CUDA on the CPU: N GPUs ($LOCAL_WORLD_SIZE, or 2)"
    add("--cpu", nargs="?", const="", metavar="N", help=text)
    add("--json", type=Path, help="write the findings to a file")
    add("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if args.cpu and not (args.cpu.isdigit() and int(args.cpu)):
        parser.error(f"--cpu takes a number of GPUs, not {args.cpu}")
    args.command = args.command[args.command[:1] == ["--"] :]
    if not args.command:
        parser.error("give a command after --, such as -- torchrun train.py")
    return args


def page(job: jobs.Job, report: Report) -> str:
    """Return the text that is printed at the end."""
    size = job.world_size
    ranks = [process.rank for process in job.processes]
    steps = [len(process.of("step")) for process in job.processes]
    lines = ["", "=" * 30 + " doctor " + "=" * 30]
    ended = "hung and was ended" if job.hung else f"ended with status {job.status}"
    lines.append(
        f"{len(ranks)} of {size} processes reported; the job {ended}; "
        f"watched optimizer steps: {', '.join(map(str, steps))}"
    )
    for one in report.findings:
        where = f"  [{one.place}]" if one.place else ""
        lines += ["", fill(f"{one.level} {one.check}: {one.what}.{where}")]
        more = {"To fix it:": one.mend, "It is not a mistake if": one.right_if}
        more["Read:"] = one.read
        lines += [fill(f"{k} {text}", "    ") for k, text in more.items() if text]
    if table := time_table(job):
        lines += ["", "Where the time of a step goes:"]
    for rank, row in table.items():
        wall = sum(row.values())
        parts = ", ".join(f"{part} {row[part] / wall:.0%}" for part in row if row[part])
        lines.append(f"  rank {rank}: {1000 * wall:.1f} ms per step: {parts}")
    if report.right:
        lines += ["", "Checked, and right:", *(fill(x, "  ") for x in report.right)]
    if report.not_checked:
        items = report.not_checked.items()
        lines += ["", "Not checked:", *(fill(f"{k} ({why})", "  ") for k, why in items)]
    return "\n".join(lines)


def fill(text: str, indent: str = "") -> str:
    """Break a paragraph into lines."""
    return textwrap.fill(
        text, 88, initial_indent=indent, subsequent_indent=indent + "  ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def main() -> int:
    """Watch a command; return the exit status."""
    args = arguments()
    options = {"DOCTOR_STEPS": str(args.steps), "DOCTOR_SHORT": str(args.short)}
    if args.machines:
        options["DOCTOR_MACHINES"] = "yes"
    if args.cpu is not None:
        options["DOCTOR_CPU"] = args.cpu
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        try:
            job = jobs.run(args.command, Path(folder), **options)
        except OSError as error:
            print(f"doctor: error: {error}", file=sys.stderr)
            return 2
    if not job.processes:
        text = "no process trained or joined a process group: nothing to check"
        print(f"doctor: error: {text} (status {job.status})", file=sys.stderr)
        return 2
    report = examine(job)
    print(page(job, report), file=sys.stderr)
    if args.cpu is not None:
        print("\n" + NOT_CHECKED, file=sys.stderr)
    if args.json:
        content = {"status": job.status, "hung": job.hung, **asdict(report)}
        content["seconds_of_a_step"] = time_table(job)
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    wrong = any(one.level == "WRONG" for one in report.findings)
    return job.status if job.status and job.status > 0 else int(wrong)


if __name__ == "__main__":
    sys.exit(main())
