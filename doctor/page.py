"""What a terminal shows at the end of a watched job."""

import os
import shutil
import sys
import textwrap

from .job import Job
from .law import BROKEN, CHECKS, HELD, Check, Finding, Report, Verdict
from .laws.time import time_table
from .moments import Step

COLOURS = {"WRONG": 31, "RISK": 33, "SLOW": 36, BROKEN: 31, HELD: 32}


def page(job: Job, report: Report, verbose: bool = False) -> str:
    """Return the text that is printed at the end."""
    width = min(100, shutil.get_terminal_size((80, 24)).columns)
    ended = "hung and was ended" if job.hung else f"ended with status {job.status}"
    steps = ", ".join(str(len(process.of(Step))) for process in job.processes)
    lines = ["", " doctor ".center(width, "=")]
    what = f"{len(job.processes)} of {job.world_size} processes reported; the job "
    lines += fill(f"{what}{ended}; optimizer steps watched: {steps}", width)
    if not job.watched:
        lines += fill(
            "NOTHING CHECKED: no optimizer step was seen. doctor watches scripts that "
            "call step() of a torch.optim.Optimizer, in the processes of the job.",
            width,
        )
    for one in report.findings:
        lines += ["", *paragraph(one, width)]
    lines.append("")
    for verdict in report.verdicts:
        lines += law_lines(verdict, width)
        if verbose:
            lines += all_checks(verdict, report, width)
    if table := time_table(job):
        lines += ["", "Where the time of a step goes:"]
    for rank, row in table.items():
        wall = sum(row.values())
        parts = ", ".join(f"{part} {row[part] / wall:.0%}" for part in row if row[part])
        lines += fill(f"rank {rank}: {1000 * wall:.1f} ms: {parts}", width, "  ")
    return "\n".join(lines)


def paragraph(one: Finding, width: int) -> list[str]:
    """Return a finding's lines."""
    where = f"  [{one.place}]" if one.place else ""
    head = f"{one.level} {one.check}: {one.what}.{where}"
    lines = fill(head, width)
    lines[0] = lines[0].replace(one.level, colour(one.level), 1)
    lines += fill(f"To fix it: {one.mend}", width, "    ")
    if one.right_if:
        lines += fill(f"It is not a mistake if: {one.right_if}", width, "    ")
    return lines + fill(f"More: {program()} --explain {one.check}", width, "    ")


def law_lines(verdict: Verdict, width: int) -> list[str]:
    """Return a law's lines: its state and the evidence."""
    law = verdict.law
    if verdict.state == HELD:
        text = "; ".join(verdict.evidence)
    elif verdict.state == BROKEN:
        text = "see above"
    else:
        reasons = verdict.not_judged
        general = [x.name for x in CHECKS.values() if x.law is law and x.general]
        found = [reasons[name] for name in (*general, *reasons) if name in reasons]
        text = (found or ["nothing was seen"])[0]
    head = f"{law.number:2} {law.text}: "
    lines = fill(f"{head}{verdict.state}: {text}", width)
    lines[0] = lines[0].replace(
        f": {verdict.state}: ", f": {colour(verdict.state)}: ", 1
    )
    return lines


def all_checks(verdict: Verdict, report: Report, width: int) -> list[str]:
    """Return what each check of a law saw."""
    lines = []
    found = {one.check for one in report.findings}
    found |= {
        x.explains.name for x in CHECKS.values() if x.name in found and x.explains
    }
    effects = {one.check: cause for one, cause in report.effects}
    for one in CHECKS.values():
        if one.law is not verdict.law:
            continue
        text = "found" if one.name in found else "not found"
        if one.name in verdict.not_judged:
            text = f"not judged: {verdict.not_judged[one.name]}"
        elif one.name in effects:
            text = f"found, perhaps an effect of {effects[one.name]}"
        lines += fill(f"{one.name}: {text}", width, "     ")
    return lines


def explanation(one: Check) -> str:
    """Return what --explain prints."""
    level = f"{one.name} ({one.level}, law {one.law.number}: {one.law.text})"
    parts = [level, one.fault, f"To fix it: {one.mend}"]
    if one.right_if:
        parts.append(f"It is not a mistake if: {one.right_if}")
    if one.read:
        parts.append(f"The repository explains it in {one.read}.")
    return "\n\n".join("\n".join(fill(part, 80)) for part in parts)


def program() -> str:
    """Return how the user can call this program."""
    name = os.path.basename(sys.argv[0])
    return name if name == "ddp-doctor" else "python -m doctor"


def colour(text: str) -> str:
    """Return a word in its colour, if a terminal shows it."""
    if text in COLOURS and sys.stderr.isatty() and "NO_COLOR" not in os.environ:
        return f"\033[{COLOURS[text]}m{text}\033[0m"
    return text


def fill(text: str, width: int, indent: str = "") -> list[str]:
    """Break a paragraph into lines."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
