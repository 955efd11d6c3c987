"""Format the report that doctor prints at the end of a watched job."""

import os
import shutil
import sys
import textwrap
from pathlib import Path

from .event import Failed, Start
from .job import Job
from .law import (
    BROKEN,
    CHECKS,
    HELD,
    NOT_JUDGED,
    NOTE,
    RISK,
    SLOW,
    WRONG,
    Check,
    Finding,
    Report,
    Verdict,
)
from .laws.time import Runs, time_table
from .moments import Step

NOTHING = "NOTHING CHECKED"
COLOURS = {WRONG: "1;31", RISK: "1;33", SLOW: "1;36", NOTHING: "1;31"}
COLOURS |= {BROKEN: "31", HELD: "32"}
RANKS = 4  # maximum number of ranks in the table of times


def page(job: Job, report: Report, verbose: bool = False) -> str:
    """Return the whole report as text."""
    width = min(100, shutil.get_terminal_size((80, 24)).columns)
    lines = ["", " doctor ".center(width, "="), *fill(summary(job), width)]
    if not job.watched:
        text = ": no optimizer step was seen on all ranks."
        if not job.of(Failed):  # the error's finding is clearer
            text += " doctor watches scripts that call step() of a PyTorch "
            text += "Optimizer in the job's processes. In float16, a GradScaler skips "
            text += "the first steps: train for a few more."
        lines += coloured(fill(NOTHING + text, width), NOTHING)
    else:
        lines += fill(conclusion(report), width)
    for one in report.findings:
        lines += ["", *paragraph(one, width)] if one.level != NOTE else ()
    lines.append("")
    for verdict in report.verdicts:
        lines += law_lines(verdict, report, width)
        if verbose:
            lines += all_checks(verdict, report, width)
    notes = [one for one in report.findings if one.level == NOTE]
    for one in notes:
        lines += paragraph(one, width)
    lines += times(job, width)
    if report.findings:
        name = report.findings[0].check
        lines += fill(f"To read more: {program()} --explain {name}", width)
    return "\n".join(lines)


def summary(job: Job) -> str:
    """Return a summary of the processes, networks and steps, and how the job ended."""
    count = f"{len(job.processes)} processes"
    if len(job.processes) == 1:
        count = "1 process"
    if job.world_size > len(job.processes):
        count = f"{len(job.processes)} of {job.world_size} processes"
    hosts = {one.host for one in job.of(Start)}
    count += f" on {len(hosts)} hosts" * (len(hosts) > 1)
    runs = job.processes[0].of(Runs)
    names = [f"{one.network} ({one.weights:,} parameters)" for one in runs]
    device = {"cuda": "emulated GPU" if job.emulated else "GPU", "cpu": "CPU"}
    devices = {device.get(one.device, one.device) for one in job.of(Runs)}
    what = f"{', '.join(names) or 'no network'} on {', '.join(sorted(devices))}"
    steps = [sum(x.watched for x in one.of(Step)) for one in job.processes]
    watched = str(steps[0]) if len({*steps}) == 1 else ", ".join(map(str, steps))
    timed = sum(not x.watched for x in job.processes[0].of(Step))
    more = f" ({timed} later ones only timed)" * (timed > 0)
    ended = f"the job ended with status {job.status}"
    if job.hung:
        ended = "the job hung, and doctor ended it"
    elif job.interrupted:
        ended = "the job was interrupted"
    trained = f"trained {what}" if names else "ran"
    return f"{count} {trained}; {watched} optimizer steps watched{more}; {ended}."


def conclusion(report: Report) -> str:
    """Return one sentence if there are no findings except notes, else ""."""
    states = [one.state for one in report.verdicts]
    if any(one.level != NOTE for one in report.findings):
        return ""
    text = f"No mistake was found: {states.count(HELD)} of {len(states)} laws held, "
    return f"{text}{states.count(NOT_JUDGED)} could not be judged and may be broken."


def paragraph(one: Finding, width: int) -> list[str]:
    """Return a finding as lines of text."""
    where = f" [{one.place}]" if one.place else ""
    lines = fill(f"{one.level} {one.check}: {one.what}{where}", width)
    lines = coloured(lines, one.level) + fill(f"To fix it: {one.mend}", width, "    ")
    if one.right_if:
        lines += fill(f"It is not a mistake if: {one.right_if}", width, "    ")
    return lines


def law_lines(verdict: Verdict, report: Report, width: int) -> list[str]:
    """Return a law's lines: the state, and as much evidence as fits into one line."""
    law, state = verdict.law, verdict.state
    head = f"{law.number:2} {state:10} {law.text}"
    if state == HELD:
        text, *others = verdict.evidence
        for one in others:
            longer = f"{text}; {one}"
            text = longer if len(f"{head}: {longer}") <= width else text
    elif state == BROKEN:
        own = [x for x in report.findings if x.law is law and x.level != NOTE]
        effects = [x for x in verdict.not_judged.values() if "an effect of" in x]
        effects = [x for x in effects if CHECKS[x.split()[-1]].law is not law]
        told = "see " + " and ".join(dict.fromkeys(one.check for one in own))
        text = ": ".join([told] * bool(own) + effects[:1])
        text += "".join(f"; seen to hold: {one}" for one in verdict.evidence[:1])
    else:
        text = why_not_judged(verdict)
    return coloured(fill(f"{head}: {text}", width, indent=" " * 14), state)


def why_not_judged(verdict: Verdict) -> str:
    """Return why a law is not judged."""
    general = [x for x in CHECKS.values() if x.law is verdict.law and x.general]
    reasons = [verdict.not_judged.get(x.name) for x in general]
    reasons = verdict.doubts * bool(verdict.evidence) + reasons
    return next(filter(None, reasons), "nothing was seen")


def all_checks(verdict: Verdict, report: Report, width: int) -> list[str]:
    """Return lines with all evidence for a law, and the result of each check."""
    lines = []
    for one in verdict.evidence:
        lines += fill(f"seen: {one}", width, "     ")
    found = {one.check for one in report.findings}
    found |= {x.explains.name for x in map(CHECKS.get, found) if x.explains}
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


def times(job: Job, width: int, most: int = RANKS) -> list[str]:
    """Return lines that show how a step's time is divided, on at most `most` ranks."""
    table = time_table(job)
    walls = {rank: sum(row.values()) for rank, row in table.items()}
    ranks = sorted(walls)
    if len(ranks) > most:  # show the ranks with the least and the most work
        own = sorted(ranks, key=lambda rank: walls[rank] - table[rank]["communication"])
        ranks = [*own[: most // 2], *own[-most // 2 :]]
    lines = [""] * bool(ranks)
    for rank in ranks:
        shares = {part: round(100 * x / walls[rank]) for part, x in table[rank].items()}
        shares["other code"] += 100 - sum(shares.values())  # shares add up to 100
        own = sorted(shares.items(), key=lambda one: -one[1])
        parts = ", ".join(f"{part} {share}%" for part, share in own if share > 0)
        text = f"A step on rank {rank} takes {1000 * walls[rank]:.1f} ms: {parts}"
        lines += fill(text, width)
    return lines


def explanation(one: Check) -> str:
    """Return the text that --explain prints for a check."""
    level = f"usually {one.level}; law {one.law.number}: {one.law.text}"
    parts = [f"{one.name} ({level})", one.fault + ".", f"To fix it: {one.mend}"]
    if one.right_if:
        parts.append(f"A RISK is not a mistake if: {one.right_if}")
    files = {"pitfall": "docs/pitfalls.md", "lesson": "tutorial/README.md"}
    files["README"] = "README.md"
    name = files.get(one.read.split(" ")[0], one.read or "docs/doctor.md")
    root = Path(__file__).resolve().parent.parent
    where = f"{name} in doctor's repository"
    where = root / name if (root / "tutorial").is_dir() else where
    parts.append(f"To read more: {where}" + f" ({one.read})" * (" " in one.read))
    return "\n\n".join("\n".join(fill(part, 80, "")) for part in parts)


def program() -> str:
    """Return the command that starts this program."""
    name = os.path.basename(sys.argv[0])
    return name if name == "ddp-doctor" else "python -m doctor"


def coloured(lines: list[str], word: str) -> list[str]:
    """Return the lines; on a terminal, colour a word's first occurrence."""
    if word in COLOURS and sys.stderr.isatty() and "NO_COLOR" not in os.environ:
        new = f"\033[{COLOURS[word]}m{word}\033[0m"
        return [lines[0].replace(word, new, 1), *lines[1:]]
    return lines


def fill(
    text: str, width: int, start: str = "", indent: str | None = None
) -> list[str]:
    """Break a paragraph into lines; indent all lines except the first."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=start,
        subsequent_indent=start + "  " if indent is None else indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
