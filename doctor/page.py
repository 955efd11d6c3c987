"""Format the report that doctor prints at the end of a watched job."""

import os
import shutil
import sys
import textwrap
from pathlib import Path

from .event import Exit, Failed, Start
from .job import Job
from .law import BROKEN, CHECKS, HELD, NOT_JUDGED, NOTE, Check, Finding, Report, Verdict
from .laws.time import Runs, time_table
from .moments import Step

NOTHING = "NOTHING CHECKED"
COLOURS = {"WRONG": "1;31", "RISK": "1;33", "SLOW": "1;36", NOTHING: "1;31"}
COLOURS |= {BROKEN: "31", HELD: "32"}


def page(job: Job, report: Report, verbose: bool = False) -> str:
    """Return the whole report as text."""
    width = min(100, shutil.get_terminal_size((80, 24)).columns)
    lines = ["", " doctor ".center(width, "="), *fill(summary(job), width)]
    if job.watched:
        lines += fill(conclusion(report), width)
    else:
        text = f"{NOTHING}: no optimizer step was seen on all ranks."
        if not job.of(Failed):  # the error's finding is clearer
            passes = max((one.passes for one in job.of(Exit)), default=0)
            text += f" A rank computed gradients {passes} times." * (passes > 0)
            text += " doctor watches step() of PyTorch's Optimizers in the job's own "
            text += "processes. In float16, a GradScaler skips the first steps."
        lines += coloured(fill(text, width), NOTHING)
    for one in mistakes(report):
        lines += ["", *paragraph(one, width)]
    lines.append("")
    for verdict in report.verdicts:
        lines += law_lines(verdict, report, width)
        lines += all_checks(verdict, report, width) if verbose else ()
    for one in report.findings:
        lines += paragraph(one, width) if one.level == NOTE else ()
    lines += times(job, width)
    if report.findings:
        name = report.findings[0].check
        lines += fill(f"To read more: {program()} --explain {name}", width)
    return "\n".join(lines)


def summary(job: Job) -> str:
    """Return a summary of the processes, networks and steps, and how the job ended."""
    here, every = len(job.processes), job.world_size
    count = f"{here} of {every} processes" if here < every else f"{here} processes"
    count = "1 process" if max(here, every) == 1 else count
    hosts = {one.host for one in job.of(Start)}
    count += f" on {len(hosts)} hosts" * (len(hosts) > 1)
    runs = job.processes[0].of(Runs)
    names = [f"{one.network} ({one.weights:,} parameters)" for one in runs]
    device = {"cuda": "emulated GPU" if job.emulated else "GPU", "cpu": "CPU"}
    devices = {device.get(one.device, one.device) for one in job.of(Runs)}
    trained = f"trained {', '.join(names)} on {', '.join(sorted(devices))}"
    steps = [sum(x.watched for x in one.of(Step)) for one in job.processes]
    steps = steps[:1] if len({*steps}) == 1 else steps
    timed = sum(not x.watched for x in job.processes[0].of(Step))
    more = f" ({timed} later ones only timed)" * (timed > 0)
    watched = f"{', '.join(map(str, steps))} optimizer steps watched{more}"
    ended = f"the job ended with status {job.status}"
    ended = "the job was interrupted" if job.interrupted else ended
    ended = "the job hung, and doctor ended it" if job.hung else ended
    return f"{count} {trained if names else 'ran'}; {watched}; {ended}."


def mistakes(report: Report) -> list[Finding]:
    """Return the findings except notes."""
    return [one for one in report.findings if one.level != NOTE]


def conclusion(report: Report) -> str:
    """Return one sentence if there are no findings except notes, else ""."""
    if mistakes(report):
        return ""
    states = [one.state for one in report.verdicts]
    text = f"No mistake was found: {states.count(HELD)} of {len(states)} laws held"
    unknown = states.count(NOT_JUDGED)
    more = f", {unknown} could not be judged and may be broken" * (unknown > 0)
    return f"{text}{more}."


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
            text += f"; {one}" * (len(f"{head}: {text}; {one}") <= width)
    elif state == BROKEN:
        own = dict.fromkeys(x.check for x in mistakes(report) if x.law is law)
        effects = [x for x in verdict.not_judged.values() if "an effect of" in x]
        effects = [x for x in effects if CHECKS[x.split()[-1]].law is not law]
        text = ": ".join(["see " + " and ".join(own)] * bool(own) + effects[:1])
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
    texts = [f"seen: {one}" for one in verdict.evidence]
    found = {one.check for one in report.findings}
    found |= {x.explains.name for x in map(CHECKS.get, found) if x.explains}
    effects = {one.check: cause for one, cause in report.effects}
    for one in (x for x in CHECKS.values() if x.law is verdict.law):
        text = "found" if one.name in found else "not found"
        if one.name in verdict.not_judged:
            text = f"not judged: {verdict.not_judged[one.name]}"
        elif one.name in effects:
            text = f"found, perhaps an effect of {effects[one.name]}"
        texts.append(f"{one.name}: {text}")
    return [line for text in texts for line in fill(text, width, "     ")]


def times(job: Job, width: int, most: int = 4) -> list[str]:
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
        text = f"A step on rank {rank} takes {1000 * walls[rank]:.1f} ms on average: "
        text += parts
        lines += fill(text, width)
    return lines


def explanation(one: Check) -> str:
    """Return the text that --explain prints for a check."""
    level = f"usually {one.level}; law {one.law.number}: {one.law.text}"
    parts = [f"{one.name} ({level})", one.fault + ".", f"To fix it: {one.mend}"]
    if one.right_if:
        parts.append(f"A RISK is not a mistake if: {one.right_if}")
    files = {"pitfall": "docs/pitfalls.md", "lesson": "tutorial/README.md"}
    files |= {"README": "README.md"}
    name = files.get(one.read.split(" ")[0], one.read or "docs/doctor.md")
    root = Path(__file__).resolve().parent.parent
    where = f"{name} in doctor's repository"
    where = root / name if (root / "tutorial").is_dir() else where
    parts.append(f"To read more: {where}" + f" ({one.read})" * (" " in one.read))
    return "\n\n".join("\n".join(fill(part, 80)) for part in parts)


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


def fill(text: str, width: int, start: str = "", indent: str = "  ") -> list[str]:
    """Break a paragraph into lines; indent all lines except the first."""
    indents = {"initial_indent": start, "subsequent_indent": start + indent}
    whole = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, width, **indents, **whole)
