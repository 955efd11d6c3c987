"""What was decided: one sentence, tables, and a figure, in Markdown, JSON and SVG."""

import json
import math
import os
import platform
import statistics
from importlib import metadata
from pathlib import Path

import torch

from common.device import describe
from timings.statistics import AGAIN, ERROR, Decision, Verdict, decide, means

WHERE = {"synthetic": "with images on the device", "jpeg": "from JPEG files"}
INPUT_BOUND = 0.1  # share of the time that waits for data
WIDTH, LEFT, LINE = 390, 12, 40  # of the figure, in pixels
STYLE = """<style>
svg{--ink:#1f2328;--paper:#ffffff;--band:#dbe9f6;--dot:#1f6feb}
@media (prefers-color-scheme:dark){svg{--ink:#e6edf3;--paper:#161b22;--band:#27384d;
--dot:#79c0ff}}
text{font:13px sans-serif;fill:var(--ink)}line{stroke:var(--ink)}
.interval{stroke:var(--dot);stroke-width:3}circle{fill:var(--dot)}
</style>
"""


def machine(device: str) -> dict:
    """Hardware and versions."""
    facts: dict = {
        "cpu": describe(torch.device("cpu")),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for package in ("torchvision", "horovod", "apex"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = None
    if device == "cuda":
        facts["gpu"] = describe(torch.device("cuda", 0))
        facts["cuda"] = torch.version.cuda
    return facts


def setting(settings: dict) -> str:
    """One line about what all candidates do."""
    kind = "GPU" if settings["device"] == "cuda" else "CPU process"
    return (
        f"{settings['arch']} at {settings['image_size']} px, {settings['precision']}, "
        f"{settings['batch_size']} images per {kind}, {settings['processes']} of them "
        f"with {settings['threads']} compute threads each, {settings['workers']} "
        f"loader processes in all; {settings['minutes']:g} minutes"
    )


def read_cohorts(folder: Path) -> list[dict]:
    """The whole cohorts of a folder; the last line may be cut off."""
    file = folder / "cohorts.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def table(rows: list[list[str]]) -> str:
    """A Markdown table that reads well as text; the first row is its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = ""
    for row in [rows[0], ["-" * width for width in widths], *rows[1:]]:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        text += f"| {' | '.join(cells)} |\n"
    return text


def interval(verdict: Verdict) -> str:
    """A ratio and its interval."""
    if math.isinf(verdict.high):
        return f"{verdict.ratio:.3f} (one cohort: no interval)"
    return f"{verdict.ratio:.3f} ({verdict.low:.3f} to {verdict.high:.3f})"


def in_words(verdict: Verdict) -> str:
    """What was decided of a pair."""
    one, other = verdict.pair
    if verdict.verdict == "equal":
        return f"{one} and {other} are equal within 3 %"
    percents = sorted(abs(1 - end) * 100 for end in (verdict.low, verdict.high))
    return (
        f"{one} is {abs(1 - verdict.ratio) * 100:.1f} % {verdict.verdict} than {other} "
        f"({percents[0]:.1f} to {percents[1]:.1f})"
    )


class Mode:
    """The cohorts of a mode, and what they decide."""

    def __init__(self, name: str, cohorts: list[dict], settings: dict, last: bool):
        self.name, self.cohorts, self.settings = name, cohorts, settings
        self.decision: Decision = decide(cohorts, settings, last)
        self.verdicts = self.decision.verdicts
        if not self.decision.honest:
            self.verdicts = [v._replace(verdict="undecided") for v in self.verdicts]

    def headline(self) -> str:
        """The part of the headline that is about this mode."""
        where = WHERE[self.name]
        decided = [v for v in self.verdicts if v.verdict != "undecided"]
        if decided:
            return f"{where}, {'; '.join(map(in_words, decided))}"
        if self.decision.copies and not self.decision.honest:
            seen = in_words(self.decision.copies[0]).replace(AGAIN, " started again")
            return f"{where}, nothing can be decided, for {seen}"
        return f"{where}, nothing was decided"

    def speed(self, name: str) -> tuple[float, float | None]:
        """Images per second, and the standard deviation over cohorts as a share."""
        logs = [-means(one)[name] for one in self.cohorts if name in one["waits"]]
        spread = statistics.stdev(logs) if len(logs) > 1 else None
        return math.exp(statistics.mean(logs)), spread

    def rows(self, problems: dict[str, str]) -> list[list[str]]:
        """The table of the strategies, or of the settings of one."""
        head = ["candidate", "images/s", "± over launches", "waited for data"]
        rows, to_base = [], {v.pair: v for v in self.verdicts}
        names = dict.fromkeys(n for one in self.cohorts for n in one["waits"])
        for name in sorted(names):
            speed, spread = self.speed(name)
            waits = [one["waits"].get(name) for one in self.cohorts]
            waited = statistics.mean(one for one in waits if one is not None)
            cells = [name, f"{speed:.1f}", "-" if spread is None else f"{spread:.1%}"]
            cells.append(f"{waited:.0%}{', input-bound' * (waited > INPUT_BOUND)}")
            if self.name != "scaling":
                verdict = to_base.get((name, self.settings["base"]))
                cells += ["-", "-"]
                if verdict:
                    cells[-2:] = [interval(verdict), verdict.verdict]
                elif name in self.settings["shown"]:
                    cells[-1] = "shown, not judged: one process, no replicas"
            rows.append(cells)
        if self.name != "scaling":
            head += [f"ratio to {self.settings['base']}", "verdict"]
            for name in self.settings["strategies"]:
                if name not in names:
                    reason = problems.get(name, "not measured")
                    rows.append([name, "-", "-", "-", "-", reason])
        return [head, *rows]

    def needed(self) -> float | None:
        """Minutes after which the rest would be decided, if nothing else changes."""
        factors = []
        for verdict in self.verdicts:
            if verdict.verdict == "undecided":
                log, half = (math.log(n) for n in (verdict.ratio, verdict.high))
                half -= log
                factors.append((half / max(abs(log), math.log(1.03) - abs(log))) ** 2)
        minutes = max(factors, default=0.0) * self.cohorts[-1]["ended"]
        return math.ceil(minutes / 10) * 10 if math.isfinite(minutes) else None

    def half_width(self) -> float | None:
        """The widest half of an interval of a judged pair, as a share."""
        halves = [math.sqrt(v.high / v.low) - 1 for v in self.verdicts if v.low > 0]
        return max(halves, default=None)

    def markdown(self, problems: dict[str, str]) -> str:
        """The section of this mode."""
        text = f"\n## {self.name}\n\n{table(self.rows(problems))}"
        if self.name == "scaling":
            return text + self.scaling()
        pairs = [[" : ".join(v.pair), interval(v), v.verdict] for v in self.verdicts]
        if pairs:
            text += "\n" + table([["pair", "ratio of images/s", "verdict"], *pairs])
        for copy in self.decision.copies:
            text += f"\n{self.settings['base']} against itself: {interval(copy)}"
            text += ", as it has to be.\n" if self.decision.honest else ": NOT EQUAL.\n"
        half, needed = self.half_width(), self.needed()
        if half is not None:
            text += (
                f"\nIntervals are ±{half:.1%} at most, of {len(self.cohorts)} cohorts"
            )
            if needed:
                text += f"; to decide the rest would take about `--minutes {needed}`"
            text += ".\n"
        return text

    def scaling(self) -> str:
        """Efficiency against one device, and what a step is made of."""
        fit, n = self.decision.fit, self.settings["processes"]
        each = self.settings["batch_size"]
        if fit is None:
            return "\nTwo cohorts are needed.\n"
        rows = [["devices x images", "efficiency (standard error)", "compared with"]]
        sizes = [one for one in fit.names if "JPEG" not in one and AGAIN not in one]
        for name in sizes:
            count, batch = map(int, name.split(" x "))
            for alone in (f"1 x {batch}", f"1 x {count * batch}"):
                if count > 1 and alone in sizes:
                    log, error = fit.compare(name, alone)
                    scale = 1 if alone == f"1 x {batch}" else 1
                    efficiency = math.exp(log) / count * scale
                    cell = f"{efficiency:.1%} (±{efficiency * error:.1%})"
                    rows.append([name, cell, alone])
        text = f"\n{table(rows)}"
        names = (f"1 x {each}", f"{n} x {each}", f"{n} x {each} JPEG")
        if set(names) <= set(fit.names):
            # seconds of a step, the batch per device being the same
            times = [
                math.exp(fit.effects[fit.names.index(name)]) * (n if k else 1)
                for k, name in enumerate(names)
            ]
            parts = [times[0], times[1] - times[0], times[2] - times[1]]
            shares = [part / times[2] for part in parts]
            text += (
                f"\nA step from JPEG files on {n} devices: computing {shares[0]:.0%}, "
                f"what more devices cost {shares[1]:.0%}, data {shares[2]:.0%}; "
                f"in all {sum(shares):.0%}.\n"
            )
        return text


def draw(modes: list[Mode], base: str) -> str:
    """The figure: ratios to the base with their intervals, and a band at 3 %."""
    drawn = [
        (mode, [v for v in mode.verdicts if v.pair[1] == base and v.low > 0])
        for mode in modes
        if mode.name != "scaling"
    ]
    ends = [end for _, found in drawn for v in found for end in (v.low, v.high)]
    reach = max([0.06, *(abs(end - 1) for end in ends)]) * 1.1
    middle, scale = WIDTH / 2, (WIDTH / 2 - LEFT) / reach
    y, body = 22, ""

    def x(ratio: float) -> float:
        return round(middle + (ratio - 1) * scale, 1)

    for mode, found in drawn:
        body += f'<text x="{LEFT}" y="{y}" font-weight="bold">'
        body += f"{WHERE[mode.name].capitalize()}</text>\n"
        top, bottom = y + 10, y + 10 + LINE * len(found)
        body += f'<rect x="{x(0.97)}" y="{top}" width="{round(0.06 * scale, 1)}" '
        body += f'height="{bottom - top}" fill="var(--band)"/>\n'
        body += f'<line x1="{middle}" x2="{middle}" y1="{top}" y2="{bottom}"/>\n'
        for number, verdict in enumerate(found):
            level = top + LINE * number
            body += f'<text x="{LEFT}" y="{level + 14}">{verdict.pair[0]}: '
            body += f"{verdict.verdict}</text>\n"
            places = f'x1="{x(verdict.low)}" x2="{x(verdict.high)}" '
            places += f'y1="{level + 26}" y2="{level + 26}"'
            body += f'<line class="interval" {places}/>\n'
            body += f'<circle cx="{x(verdict.ratio)}" cy="{level + 26}" r="5"/>\n'
        y = bottom + 34
    y -= 14
    for ratio in (1 - reach / 1.1, 0.97, 1, 1.03, 1 + reach / 1.1):
        if ratio in (1, 1 - reach / 1.1, 1 + reach / 1.1) or reach < 0.2:
            body += f'<text x="{x(ratio)}" y="{y}" text-anchor="middle">'
            body += f"{ratio:.2f}</text>\n"
    body += f'<text x="{LEFT}" y="{y + 20}">Speed over that of {base}; band: ±3 %'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 32}" '
        f'width="{WIDTH}" height="{y + 32}">\n{STYLE}<rect width="100%" height="100%" '
        f'fill="var(--paper)"/>\n{body}</text>\n</svg>\n'
    )


def gpu_log(cohorts: list[dict]) -> str:
    """Clock, power and temperature over all turns, where there are GPUs."""
    turns = [gpu for one in cohorts for gpus in one["between"] for gpu in gpus]
    lines = ""
    for name in ("clocks.sm", "power.draw", "temperature.gpu"):
        values = [gpu[name] for gpu in turns]
        if values:
            lines += f"- {name}: {min(values):g} to {max(values):g}\n"
    return f"\nAfter turns, of all GPUs:\n\n{lines}" if lines else ""


def write(folder: Path, last: bool) -> str:
    """Write report.md, report.json and timings.svg; returns the first of them.

    Args:
        last: whether the time is over, or all is decided.
    """
    settings = json.loads((folder / "settings.json").read_text())
    cohorts = read_cohorts(folder)
    modes = [
        Mode(name, found, settings, last)
        for name in settings["modes"]
        if (found := [one for one in cohorts if one["mode"] == name])
    ]
    problems = {n: text for one in cohorts for n, text in one["problems"].items()}
    parts = [mode.headline() for mode in modes if mode.name != "scaling"]
    headline = ". ".join(part[0].upper() + part[1:] for part in parts)
    minutes = cohorts[-1]["ended"] if cohorts else 0.0
    text = f"# Timings\n\n**{headline}.**\n\n![Ratios](timings.svg)\n"
    text += "".join(mode.markdown(problems) for mode in modes)
    versions = ("torch", "torchvision", "horovod", "apex", "python", "commit")
    named = ", ".join(f"{n} {settings[n]}" for n in versions if settings.get(n))
    device = settings.get("gpu") or f"{settings['cpu']}, {settings['cpu_cores']} cores"
    text += (
        f"{gpu_log(cohorts)}\n{setting(settings)}, of which {minutes:.1f} were used.\n"
        f"{device}; {named}.\n\nAn interval is what Student's t gives over launches; "
        f"all verdicts of a mode are right but for a chance of {ERROR:.0%} (Holm's "
        "method, shared out over the planned looks).\n"
    )
    (folder / "report.md").write_text(text)
    (folder / "timings.svg").write_text(draw(modes, settings["base"]))
    report = {
        "minutes": minutes,
        "device": device,
        "headline": headline,
        "verdicts": [
            {**v._asdict(), "mode": mode.name, "low": v.low, "high": finite(v.high)}
            for mode in modes
            for v in mode.verdicts
        ],
        "copies": [
            {**v._asdict(), "mode": mode.name, "high": finite(v.high)}
            for mode in modes
            for v in mode.decision.copies
        ],
        "half_widths": {mode.name: mode.half_width() for mode in modes},
        "problems": problems,
        "settings": settings,
    }
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    return text


def finite(number: float) -> float | None:
    """A number as JSON can hold it."""
    return number if math.isfinite(number) else None
