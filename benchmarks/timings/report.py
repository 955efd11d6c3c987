"""Writes the verdicts as a headline and tables in Markdown, and as JSON."""

import json
import math
import os
import platform
import statistics
from importlib import metadata, util
from pathlib import Path

import torch

from benchmarks.comparison import describe
from benchmarks.timings.statistics import ERROR, Verdict, decide, levels

WHERE = {"synthetic": "With images on the device", "jpeg": "From JPEG files"}
LIBRARIES = ("horovod", "apex", "amp_C")  # the last one is Apex's CUDA extension


def machine(device: str) -> dict:
    """Describe the hardware and versions ("installed" if a library has no metadata)."""
    known = {one.name: one.version for one in metadata.distributions()}
    return {
        "device_name": describe(torch.device(device)),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{n: known.get(n, util.find_spec(n) and "installed") for n in LIBRARIES},
    }


def setting(settings: dict) -> str:
    """Describe the settings that all candidates share, on one line."""
    return (
        "{arch} at {image_size} px, {precision}, batch size {batch_size} in each of "
        "{processes} processes with {threads} compute thread(s) and {workers} loader "
        "process(es) each; {minutes:g} minutes"
    ).format(**settings)


def read_cohorts(folder: Path) -> list[dict]:
    """Read a folder's complete cohorts; ignore an incomplete last line of the file."""
    file = folder / "cohorts.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def table(head: str, rows: list[list[str]]) -> str:
    """Format a Markdown table; `head` is comma-separated."""
    columns = head.split(", ")
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def interval(verdict: Verdict) -> str:
    """Format a ratio and its confidence interval."""
    return f"{verdict.ratio:.3f} ({verdict.low:.3f} to {verdict.high:.3f})"


def in_words(verdict: Verdict) -> str:
    """Describe a verdict in words."""
    one, other = verdict.pair
    if verdict.verdict == "equal":
        return f"{one} and {other} are equal within 3 %"
    percent, *ends = (abs(1 - n) * 100 for n in (verdict.ratio, *verdict[3:]))
    return (
        f"{one} is {percent:.1f} % {verdict.verdict} than {other} "
        f"({min(ends):.1f} to {max(ends):.1f})"
    )


class Mode:
    """A mode's cohorts, and the verdicts on its pairs of candidates."""

    def __init__(self, name: str, cohorts: list[dict], settings: dict, last: bool):
        self.name, self.cohorts, self.settings = name, cohorts, settings
        self.decision = decide(cohorts, settings, last=False)
        if last and not self.decision.over:
            self.decision = decide(cohorts, settings, last)
        self.verdicts, self.copies = self.decision.verdicts, self.decision.copies
        if not self.decision.honest:
            self.verdicts = [v._replace(verdict="undecided") for v in self.verdicts]
        halves = [math.sqrt(v.high / v.low) - 1 for v in self.verdicts if v.low]
        self.half_width = max(halves, default=None)

    def headline(self) -> str:
        """Return this mode's part of the headline."""
        if self.name == "scaling":
            return "The table below shows the efficiency on several devices."
        base = self.settings["base"]
        decided = [v for v in self.verdicts if v.verdict != "undecided"]
        with_base = [v for v in decided if v.pair[1] == base]
        text = "; ".join(map(in_words, with_base or decided))
        text = text or f"nothing was decided after {len(self.cohorts)} cohort(s)"
        if self.verdicts and not self.decision.honest:
            problem = "differ" if self.copies else "were not both measured"
            text = f"there are no verdicts, because two copies of {base} {problem}"
        return f"{WHERE[self.name]}, {text}."

    def speeds(self) -> list[list[str]]:
        """Return the rows of the candidates' table."""
        rows, turns = [], [turn for one in self.cohorts for turn in one["turns"]]
        for name in sorted({turn[0] for turn in turns}):
            found = [levels(one, self.settings["shown"]) for one in self.cohorts]
            logs = [one[name] for one in found if name in one]
            waited = statistics.mean(turn[2] for turn in turns if turn[0] == name)
            spread = f"{statistics.stdev(logs):.1%}" if len(logs) > 1 else "-"
            speed = f"{math.exp(-statistics.mean(logs)):.1f}"
            rows.append([name, speed, spread, f"{waited:.0%}"])
        return rows

    def markdown(self) -> str:
        """Return this mode's section of the report."""
        head = "candidate, images/s, spread over launches, waited for data"
        text = f"\n## {self.name}\n\n{table(head, self.speeds())}\n"
        if self.name == "scaling":
            return text + self.scaling()
        rows = [[" : ".join(v.pair), interval(v), v.verdict] for v in self.verdicts]
        alike = "no significant difference" if self.decision.honest else "DIFFERENT"
        for one in self.copies:
            rows.append([" : ".join(one.pair), interval(one), alike])
        text += table("pair, ratio of images/s, verdict", rows)
        if self.half_width is not None:
            text += f"\nThe widest interval is ±{self.half_width:.1%}, from "
            text += f"{len(self.cohorts)} cohorts.\n"
        return text

    def scaling(self) -> str:
        """Return a table of efficiencies relative to one device."""
        fit, rows = self.decision.fit, []
        for name in fit.names if fit else ():
            count, _, batch = name.partition(" x ")
            if count == "1" or not batch.isdecimal():
                continue
            for alone in (f"1 x {batch}", f"1 x {int(count) * int(batch)}"):
                if alone in fit.names:
                    log, error = fit.compare(name, alone)
                    share = math.exp(log) / int(count)
                    rows.append([name, alone, f"{share:.1%} ± {share * error:.1%}"])
        head = "devices x images, relative to, efficiency ± standard error"
        return table(head, rows)


def notes(settings: dict) -> list[str]:
    """Return the conditions of the measurements, as sentences."""
    found = []
    if settings["device"] == "cpu":
        found.append("Processes were pinned to cores, and glibc kept freed memory.")
    if settings["data"] is None and "jpeg" in settings["modes"]:
        found.append(
            "The JPEG files are links to 64 generated images, which stay in memory. "
            "To include the disk's speed, pass --data DIR."
        )
    for name in settings["shown"]:
        found.append(f"{name} is one process with all threads here: no verdict.")
    return found


def write(folder: Path, last: bool) -> str:
    """Write report.md and report.json; return the text of report.md."""
    settings = json.loads((folder / "settings.json").read_text())
    cohorts = read_cohorts(folder)
    problems = dict(settings["skipped"])
    for one in cohorts:
        found = one["problems"].items()
        problems |= {f"{name} ({one['mode']})": text for name, text in found}
    modes = []
    for name in settings["modes"]:
        if found := [one for one in cohorts if one["mode"] == name]:
            modes.append(Mode(name, found, settings, last))
    headline = " ".join(mode.headline() for mode in modes)
    text = f"# Timings\n\n**{headline}**\n\n"
    text += "".join(mode.markdown() for mode in modes)
    text += "".join(f"\nLeft out: {n}: {why}\n" for n, why in problems.items())
    text += "".join(f"\n{note}\n" for note in notes(settings))
    minutes = cohorts[-1]["ended"] if cohorts else 0.0
    text += f"\n{setting(settings)}, of which {minutes:.1f} were used.\n"
    text += (
        "{device_name}, {cpu_cores} cores; Python {python}, PyTorch {torch}, Horovod "
        "{horovod}, Apex {apex} (amp_C: {amp_C}); commit {commit}.\n\n"
        "The chance that any verdict of a mode is wrong is at most {error:.0%}.\n"
    ).format(**settings, error=ERROR)
    verdicts = [{**v._asdict(), "mode": m.name} for m in modes for v in m.verdicts]
    report = {
        "minutes": minutes,
        "headline": headline,
        "verdicts": verdicts,
        "half_widths": {mode.name: mode.half_width for mode in modes},
        "problems": problems,
        "settings": {n: value for n, value in settings.items() if n != "output"},
    }
    (folder / "report.md").write_text(text)
    written = json.dumps(report, indent=1).replace("Infinity", "null")
    (folder / "report.json").write_text(written + "\n")
    return text
