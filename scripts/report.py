"""Make a table, a figure and a conclusion of the runs that scripts/timings.py measured.

python scripts/report.py results/DIR    # report.md, table.md, words.md, timings.svg
"""

import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from quickstart import LAUNCHERS, aligned

from common.arguments import IMAGENET_TRAIN_IMAGES
from common.errors import UserError
from launch.exits import exit_status, say

MEASURED = (
    "images_per_second",
    "step_milliseconds",
    "step_milliseconds_p90",
    "data_wait_share",
    "peak_memory_mib",
    "seconds",
)
FIRST = ("strategy", "images/s", "verdict", "s/epoch", "input", "more devices")
COLUMNS = (*FIRST, "±", "step, ms", "p90", "GPU in use", "processes", "started by")
LOSS = 0.1  # the share of the time from which on something is called the bound
NO_REPLICAS = "one process, no replicas"
CONFIDENCE = 0.99  # of the tests behind what is claimed
COLOURS = {
    "dataparallel": "#d08a1d",
    "distributed": "#3a86c8",
    "multiprocessing_distributed": "#2f9e77",
    "apex_distributed": "#b0559a",
    "horovod_distributed": "#cf5f3c",
}
# Colours of the figure that follow the reader's light or dark screen
THEMES = {
    "--ink": ("#1f2328", "#e6edf3"),
    "--paper": ("#fffffe", "#161b22"),
    "--grid": ("#d0d7de", "#3d444d"),
}
# From the fastest to the slowest repeat
RANGE = {"color": THEMES["--ink"][0], "lw": 1.2, "marker": "|", "ms": 6}


class Row(NamedTuple):
    """What was measured of one strategy under one setting, over its repeats."""

    mode: str
    devices: int
    global_batch_size: int
    precision: str
    strategy: str
    runs: list[dict]

    def median(self, name: str) -> float | None:
        """Median over the repeats; None where it was not measured."""
        values = [run[name] for run in self.runs if run[name] is not None]
        return statistics.median(values) if values else None

    @property
    def speed(self) -> float:
        """Images per second."""
        return self.median("images_per_second")

    @property
    def spread(self) -> float | None:
        """Half of the distance between the fastest and the slowest repeat, relative."""
        if len(self.runs) < 2:
            return None
        speeds = [run["images_per_second"] for run in self.runs]
        return (max(speeds) - min(speeds)) / 2 / self.speed

    @property
    def fastest(self) -> float:
        """Time of the fastest repeat over that of the median one."""
        return self.speed / max(run["images_per_second"] for run in self.runs)

    @property
    def slowest(self) -> float:
        """Time of the slowest repeat over that of the median one."""
        return self.speed / min(run["images_per_second"] for run in self.runs)

    @property
    def p90(self) -> str:
        """90th percentile of a step's milliseconds; "-" of fewer than ten laps."""
        laps = (run["timed_steps"] // run["steps_between_looks"] for run in self.runs)
        if min(laps) < 10:
            return "-"
        return f"{self.median('step_milliseconds_p90'):.0f}"

    @property
    def cell(self) -> tuple:
        """What all strategies do."""
        return self[:4]

    @property
    def setting(self) -> str:
        """Devices times images of each."""
        return f"{self.devices} x {self.global_batch_size // self.devices}"


def log_speeds(one: Row, other: Row | None = None) -> list[float]:
    """Logarithm of a row's speed in each turn, or of its ratio to another's there."""
    speeds = {run["repeat"]: run["images_per_second"] for run in one.runs}
    if other is None:
        return [math.log(speed) for speed in speeds.values()]
    return [
        math.log(speeds[run["repeat"]] / run["images_per_second"])
        for run in other.runs
        if run["repeat"] in speeds
    ]


def deviation(rows: Iterable[Sequence[Row]]) -> float:
    """Standard deviation over turns of speeds, or of ratios where pairs are given.

    Pooled; infinite where nothing was repeated.
    """
    squares, freedom = 0.0, 0
    for one in rows:
        logs = log_speeds(*one)
        if logs:
            squares += statistics.pvariance(logs) * len(logs)
            freedom += len(logs) - 1
    return math.sqrt(squares / freedom) if freedom else math.inf


def t_quantile(freedom: int) -> float:
    """What Student's t with so many degrees of freedom stays below, by CONFIDENCE.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5
    """
    if freedom < 1:
        return math.inf
    z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


class Timings:
    """All that a folder of timings holds."""

    def __init__(self, folder: Path):
        """Read it.

        Raises:
            UserError: it holds no runs.
        """
        files = sorted((folder / "runs").glob("*.json"))
        if not files or not (folder / "settings.json").exists():
            raise UserError(f"no runs of scripts/timings.sh in {folder}/runs")
        self.settings = json.loads((folder / "settings.json").read_text())
        problems = folder / "problems.json"  # not there yet where it was interrupted
        self.problems = json.loads(problems.read_text()) if problems.exists() else {}
        loader = folder / "loader.json"  # not there where the loaders failed
        self.loader = json.loads(loader.read_text()) if loader.exists() else None
        self.runs = [json.loads(file.read_text()) for file in files]
        if not all({"wall_seconds", "later_loss"} <= run.keys() for run in self.runs):
            raise UserError(f"{folder} was measured by an earlier scripts/timings.py")
        self.rows: dict[tuple, Row] = {}
        for run in self.runs:
            key = tuple(run[name] for name in Row._fields[:-1])
            self.rows.setdefault(key, Row(*key, [])).runs.append(run)
        self.largest = self.settings["devices"][-1]
        self.cpu = self.settings["device"] == "cpu"
        self.together = self.settings["batch_size"] * (2 if self.cpu else 4)

    def of(self, mode: str, devices: int, batch: int | None = None) -> list[Row]:
        """The rows of one setting, in the order of the strategies."""
        found = [
            row
            for row in self.rows.values()
            if (row.mode, row.devices) == (mode, devices)
            and batch in (None, row.global_batch_size)
        ]
        return sorted(found, key=lambda row: list(LAUNCHERS).index(row.strategy))

    def get(self, mode: str, devices: int, batch: int, like: Row) -> Row | None:
        """One row of the strategy and precision of another."""
        return self.rows.get((mode, devices, batch, like.precision, like.strategy))

    def problem(self, strategy: str, precision: str) -> str:
        """Why a strategy has no figures from JPEG files on all devices."""
        batch = self.settings["batch_size"]
        run = f"data-{self.largest}x{batch}-{precision}-{strategy}-1"
        for name in (f"{strategy} {precision}", run):
            if name in self.problems:
                return self.problems[name]
        return "not measured"

    def error(self, mode: str) -> float:
        """Standard deviation of a run's speed over the repeats of a mode, relative."""
        return deviation([row] for row in self.rows.values() if row.mode == mode)

    def freedom(self, mode: str) -> int:
        """Degrees of freedom of error()."""
        rows = [row for row in self.rows.values() if row.mode == mode]
        return sum(len(row.runs) - 1 for row in rows)

    def ratio_error(self, mode: str) -> float:
        """Standard deviation over turns of how fast one strategy is to another.

        What the machine does meanwhile slows all strategies of a turn alike, and is not
        in it.
        """
        return deviation(
            pair for rows in self.cells(mode) for pair in combinations(rows, 2)
        )

    def ratio_freedom(self, mode: str) -> int:
        """Degrees of freedom of ratio_error()."""
        return sum(
            (len(rows) - 1) * (min(len(row.runs) for row in rows) - 1)
            for rows in self.cells(mode)
        )

    def cells(self, mode: str) -> list[list[Row]]:
        """The rows of a mode that can be compared, by what is equal for them."""
        cells: dict[tuple, list[Row]] = {}
        for row in self.rows.values():
            if row.mode == mode and not self.no_replicas(row.strategy):
                cells.setdefault(row.cell, []).append(row)
        return list(cells.values())

    def differ(self, one: Row, other: Row) -> bool:
        """Whether one row is faster than another, and that is no chance.

        By a t-test of the ratio of the two, turn by turn. Its standard deviation is
        that of all pairs of strategies in the mode, or of these two where it is larger.
        """
        logs = log_speeds(one, other)
        if len(logs) < 2:
            return False
        error = max(self.ratio_error(one.mode), deviation([(one, other)]))
        least = t_quantile(self.ratio_freedom(one.mode)) * error / math.sqrt(len(logs))
        return statistics.mean(logs) > least

    def efficiency(self, row: Row, alone_batch: int) -> float | None:
        """Speed of each device against the one that computes `alone_batch` alone."""
        alone = self.get(row.mode, 1, alone_batch, row)
        return row.speed / (row.devices * alone.speed) if alone else None

    def lost_to_devices(self, row: Row) -> float | None:
        """Share of a step's time that goes where several devices work together."""
        device = self.get("device", row.devices, row.global_batch_size, row)
        if device is None:
            return None
        efficiency = self.efficiency(device, row.global_batch_size // row.devices)
        return None if efficiency is None else max(0.0, 1 - efficiency)

    def lost_to_input(self, row: Row) -> float | None:
        """Share of the time in which data is waited for, or loaders take the cores."""
        device = self.get("device", row.devices, row.global_batch_size, row)
        if device is None:
            return row.median("data_wait_share")
        return max(row.median("data_wait_share"), 1 - row.speed / device.speed)

    def doubt(self, row: Row) -> float:
        """What the two shares of a row may be off by, with CONFIDENCE."""
        device = self.get("device", row.devices, row.global_batch_size, row)
        rows = [one for one in (row, device) if one]
        modes = ("data", "device")
        error = max(deviation([[one]]) for one in rows)
        error = max(error, *map(self.error, modes))
        freedom = min(map(self.freedom, modes))
        repeats = sum(1 / len(one.runs) for one in rows)
        return t_quantile(freedom) * error * math.sqrt(repeats)

    def verdict(self, row: Row) -> str:
        """What the time of a row goes into, but for computing."""
        if self.no_replicas(row.strategy):
            return NO_REPLICAS
        losses = {
            "input-bound": self.lost_to_input(row),
            "communication-bound": self.lost_to_devices(row),
        }
        if None in losses.values():
            return "undecided"
        worst = max(losses, key=losses.get)
        doubt = self.doubt(row)
        if losses[worst] >= LOSS + doubt:
            return worst
        return "compute-bound" if losses[worst] < LOSS - doubt else "undecided"

    def no_replicas(self, strategy: str) -> bool:
        """Whether a row says nothing of its strategy: there are no GPUs to copy to."""
        return self.cpu and strategy == "dataparallel"

    def seconds_per_epoch(self, row: Row) -> float:
        """Seconds for all images of ImageNet: measured, or made of images/s."""
        if self.settings["full"]:
            return row.median("seconds")
        return IMAGENET_TRAIN_IMAGES / row.speed


def percent(share: float | None, doubt: float = 0.0) -> str:
    """A share as text, in brackets where it may be all noise."""
    if share is None:
        return "-"
    return f"({share:.0%})" if share < doubt else f"{share:.0%}"


def main_table(timings: Timings, precision: str, columns: tuple = COLUMNS) -> str:
    """One line for each strategy, from JPEG files, on all devices."""
    rows = {
        row.strategy: row
        for row in timings.of("data", timings.largest)
        if row.precision == precision
    }
    lines = []
    for strategy, launcher in LAUNCHERS.items():
        row = rows.get(strategy)
        line = {"strategy": strategy, "images/s": "-"}
        if row is None:
            line |= {"verdict": timings.problem(strategy, precision)}
        else:
            doubt, busy = timings.doubt(row), row.median("gpu_utilisation")
            line |= {
                "images/s": f"{row.speed:.0f}",
                "verdict": timings.verdict(row),
                "s/epoch": f"{timings.seconds_per_epoch(row):.0f}",
                "input": percent(timings.lost_to_input(row), doubt),
                "more devices": percent(timings.lost_to_devices(row), doubt),
                "±": percent(row.spread),
                "step, ms": f"{row.median('step_milliseconds'):.0f}",
                "p90": row.p90,
                "GPU in use": "-" if busy is None else f"{busy:.0f}%",
                "processes": str(row.runs[0]["run"]["world_size"]),
            }
        lines.append(line | {"started by": launcher})
    measured = {name for line in lines for name, text in line.items() if text != "-"}
    columns = [name for name in columns if name in FIRST or name in measured]
    return aligned(
        [columns, *([line.get(name, "-") for name in columns] for line in lines)]
    )


def scaling_table(
    timings: Timings, precision: str, weak: bool, mode: str = "device"
) -> str:
    """Images/s and efficiency on 1, 2, 4 ... devices."""
    each = timings.settings["batch_size"]
    counts = [
        count
        for count in timings.settings["devices"]
        if (weak or not timings.together % count)
        and (mode == "device" or count in (1, timings.largest))
    ]
    lines = [["strategy"]]
    for count in counts:
        batch = each if weak else timings.together // count
        lines[0].append(f"{count} x {batch}")
    for strategy in LAUNCHERS:
        line = [strategy]
        for count in counts:
            batch = count * each if weak else timings.together
            row = timings.rows.get((mode, count, batch, precision, strategy))
            if row is None:
                line.append("-")
                continue
            if timings.no_replicas(strategy):
                line.append(f"{row.speed:.0f}")
                continue
            share = timings.efficiency(row, each if weak else timings.together)
            line.append(f"{row.speed:.0f}" + (f" ({share:.0%})" if share else ""))
        lines.append(line)
    return aligned(lines)


def conclusion(timings: Timings, precision: str) -> str:
    """Which strategy is fastest, by how much, and whether that exceeds the spread."""
    sentences = []
    for mode, title in (
        ("data", "From JPEG files"),
        ("device", "With data on the device already"),
    ):
        batch = timings.largest * timings.settings["batch_size"]
        rows = [
            row
            for row in timings.of(mode, timings.largest, batch)
            if row.precision == precision and not timings.no_replicas(row.strategy)
        ]
        if not rows:
            continue
        best = max(rows, key=lambda row: row.speed)
        behind = [
            f"{row.strategy} by {faster(best, row):.0%}"
            for row in rows
            if row is not best and timings.differ(best, row)
        ]
        level = [
            row.strategy
            for row in rows
            if row is not best and not timings.differ(best, row)
        ]
        text = f"{title}, {best.strategy} reached {best.speed:.0f} images/s"
        if behind:
            text += f", faster than {listed(behind)}"
        text += "."
        if level:
            text += f" Its lead over {listed(level)} may be chance."
        sentences.append(text)
    verdicts: dict[str, list[str]] = {}
    for row in timings.of("data", timings.largest):
        if row.precision == precision and not timings.no_replicas(row.strategy):
            verdicts.setdefault(timings.verdict(row), []).append(row.strategy)
    sentences += [
        f"Verdict on {listed(names)}: {verdict}." for verdict, names in verdicts.items()
    ]
    return "\n".join(sentences)


def faster(one: Row, other: Row) -> float:
    """How much faster one row is than another: the mean over turns of their ratio."""
    return math.exp(statistics.mean(log_speeds(one, other))) - 1


def listed(names: list[str]) -> str:
    """A, b and c."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def strange_losses(timings: Timings) -> str:
    """Name runs whose loss shows that they did something else than their like."""
    found = []
    for row in timings.rows.values():
        like = [
            run["later_loss"]
            for other in timings.of(row.mode, row.devices, row.global_batch_size)
            if other.precision == row.precision
            for run in other.runs
        ]
        usual = statistics.median(like)
        found += [
            f"{row.strategy}, {row.mode}, {row.setting}: later loss "
            f"{run['later_loss']:.3f}, {usual:.3f} in the others"
            for run in row.runs
            if not abs(run["later_loss"] - usual) <= max(0.1 * usual, 0.05)
        ]
    if found:
        return "**Losses that differ, look at these runs:** " + "; ".join(found)
    return (
        "The mean loss after the first lap is everywhere within 10 % (or 0.05) of the "
        "median of all runs of the setting."
    )


def hardware(timings: Timings) -> str:
    """What was measured, on what and with which versions."""
    settings, facts = timings.settings, timings.runs[0]["machine"]
    names = ("torch", "torchvision", "horovod", "apex", "cuda", "nccl", "python")
    versions = ", ".join(f"{name} {facts[name]}" for name in names if facts.get(name))
    devices = [gpu.split(",")[0] for gpu in facts.get("gpus", [])]
    what = f"{timings.largest} x {devices[0]}" if devices else "no GPU"
    steps, laps = (
        spread_of(run["timed_steps"] // divisor for run in timings.runs)
        for divisor in (1, settings["lap"])
    )
    repeats = spread_of(len(row.runs) for row in timings.rows.values())
    minutes = sum(run["wall_seconds"] for run in timings.runs) / 60
    return (
        f"{settings['arch']} at {settings['image_size']} px, "
        f"{' and '.join(settings['precision'])}, {settings['batch_size']} images for "
        f"each of {timings.largest} "
        f"{'GPUs' if settings['device'] == 'cuda' else 'CPU processes'} "
        f"({settings['threads']} compute thread{'s' * (settings['threads'] > 1)} each, "
        f"dataparallel as many in all), {settings['workers']} loader processes in all, "
        f"{steps} timed steps in {laps} laps after a warm-up, {repeats} times in "
        f"turns: {len(timings.runs)} runs in {minutes:.0f} minutes.\n"
        f"{facts['cpu']}, {facts['cpu_cores']} cores, {what}; {versions}; commit "
        f"{str(settings['commit'])[:12]}."
    )


def spread_of(values: Iterable[int]) -> str:
    """The only one of some numbers, or their range."""
    found = list(values)
    least, most = min(found), max(found)
    return f"{least}" if least == most else f"{least} to {most}"


def notes(timings: Timings) -> str:
    """How the columns are made."""
    epoch = (
        "s/epoch was measured over a whole epoch"
        if timings.settings["full"]
        else f"s/epoch is {IMAGENET_TRAIN_IMAGES:,} images at that speed"
    )
    claims = []
    for mode, where in (("data", "JPEG files"), ("device", "data on the device")):
        error = varies = timings.ratio_error(mode)
        freedom = timings.ratio_freedom(mode)
        if not freedom:
            claims.append(
                f"With {where} no two were compared twice: nothing is claimed."
            )
            continue
        error *= t_quantile(freedom) / math.sqrt(timings.settings["repeats"])
        claims.append(
            f"With {where} the ratio of two strategies varies by {varies:.1%} "
            "(standard deviation over turns):\ndifferences below "
            f"{math.expm1(error):.0%} may be chance."
        )
    loader = "The loaders alone were not timed"
    if timings.loader:
        speed = timings.loader["images_per_second"]
        loader = f"The loaders alone make {speed:.0f} images/s"
    text = (
        f"{epoch}; input is the share of the time lost to it: waiting, or loaders in "
        "the way of the\ntraining; more devices is the share of a step's time lost by "
        "each device against one alone; in\nbrackets: may be all noise. The verdict is "
        f"the larger of the two where it is above {LOSS:.0%}\nin spite of the noise. "
        f"{loader}.\nWhat is claimed has a confidence of {CONFIDENCE:.0%} (t-test over "
        "the turns).\n" + "\n".join(claims)
    )
    if "photographs" in timings.settings["data"]:
        text += (
            "\nThe JPEG files are few different ones under many names: they are read "
            "from memory, not from a disk."
        )
    if timings.cpu:
        text += (
            "\nOn a CPU dataparallel is one process with all the threads and no "
            "replicas,\nso it is left out of the comparison; and what more processes "
            "cost there is also the memory\nthat they share."
        )
    if any(row.strategy == "apex_distributed" for row in timings.rows.values()):
        text += (
            "\nApex computes with opt level O1 (fp32: O0) and in NCHW order, the "
            "others in channels_last."
        )
    return text


def markdown(timings: Timings) -> str:
    """The whole report."""
    text = f"# Timings\n\n{hardware(timings)}\n\n![The figure](timings.svg)\n"
    for precision in timings.settings["precision"]:
        text += (
            f"\n## {precision}\n\n{conclusion(timings, precision)}\n\n"
            f"{main_table(timings, precision)}\n{notes(timings)}\n± is half the range "
            "of the repeats; a step and its 90th percentile are over laps, of each the "
            "mean of its steps.\n\n"
            "Images/s with random data on the device, devices x images of each "
            "(efficiency against one device).\nThe same batch for each device (weak "
            f"scaling):\n\n{scaling_table(timings, precision, weak=True)}\n"
            "The same batch in all (strong scaling):\n\n"
            f"{scaling_table(timings, precision, weak=False)}\n"
        )
        alone = timings.settings["batch_size"]
        if timings.of("data", 1, alone) and timings.largest > 1:
            text += (
                "Images/s from JPEG files, the same batch for each device:\n\n"
                f"{scaling_table(timings, precision, weak=True, mode='data')}\n"
            )
    text += strange_losses(timings)
    for kind, reason in timings.problems.items():
        text += f"\n\nNot measured: {kind}: {reason}"
    return f"{text}\n"


def draw(timings: Timings, folder: Path) -> None:
    """Write timings.svg, which follows light and dark screens, and timings.png."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ink, paper, grid = (light for light, _ in THEMES.values())
    style = {
        "font.size": 9,
        "svg.fonttype": "none",
        "svg.hashsalt": "timings",
        "figure.facecolor": paper,
        "axes.facecolor": paper,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": grid,
        "axes.spines.top": False,
        "axes.spines.right": False,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), ink),
        **dict.fromkeys(("xtick.color", "ytick.color"), ink),
    }
    precision = timings.settings["precision"][0]
    with plt.rc_context(style):
        figure = plt.figure(figsize=(4.6, 5.9), layout="constrained")
        bars, curves = figure.subfigures(2, 1, height_ratios=(1.15, 1))
        draw_bars(timings, precision, bars.subplots())
        left, right = curves.subplots(1, 2, sharey=True)
        draw_scaling(timings, precision, left, weak=True)
        draw_scaling(timings, precision, right, weak=False)
        left.set_ylabel("speed-up over one")
        figure.savefig(folder / "timings.png", dpi=200)
        file = folder / "timings.svg"
        figure.savefig(file, metadata={"Date": None, "Creator": None})
        plt.close(figure)
    file.write_text(themed(file.read_text()))


def themed(svg: str) -> str:
    """Let the figure's three neutral colours follow the reader's screen."""
    light, dark = (
        "".join(f"{name}: {colours[theme]};" for name, colours in THEMES.items())
        for theme in (0, 1)
    )
    for name, (colour, _) in THEMES.items():
        svg = svg.replace(colour, f"var({name})")
    rules = (
        f"<style>:root{{{light}}} @media (prefers-color-scheme: dark)"
        f"{{:root{{{dark}}}}} text{{fill: var(--ink)}}</style>"
    )
    before, tag, after = svg.partition("<defs>")
    return before + rules + tag + after


def draw_bars(timings: Timings, precision: str, axes) -> None:
    """Seconds per epoch, split into computing and waiting for data."""
    rows = {
        row.strategy: row
        for row in timings.of("data", timings.largest)
        if row.precision == precision
    }
    longest = max(
        (timings.seconds_per_epoch(row) * row.slowest for row in rows.values()),
        default=1,
    )

    def write(x: float, y: float, text: str, **how: str) -> None:
        spot = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(text, (x, y), **spot, **how)

    for position, strategy in enumerate(LAUNCHERS):
        row = rows.get(strategy)
        write(0, position - 0.34, strategy, weight="bold")
        if row is None:
            reason = timings.problem(strategy, precision)
            write(0, position + 0.08, reason.split(":")[0])
            continue
        seconds = timings.seconds_per_epoch(row)
        waiting = seconds * timings.lost_to_input(row)
        colour = COLOURS[strategy]
        axes.barh(position + 0.08, seconds - waiting, height=0.36, color=colour)
        axes.barh(
            position + 0.08,
            waiting,
            left=seconds - waiting,
            height=0.36,
            facecolor=THEMES["--paper"][0],
            edgecolor=colour,
            hatch="////",
        )
        ends = seconds * row.fastest, seconds * row.slowest
        axes.plot(ends, [position + 0.08] * 2, **RANGE)
        write(max(seconds, ends[1]), position + 0.08, f"{seconds:,.0f} s")
        if timings.no_replicas(strategy):
            write(0, position + 0.08, NO_REPLICAS, color=THEMES["--paper"][0])
    axes.set_ylim(len(LAUNCHERS) - 0.5, -0.6)
    axes.set_xlim(0, 1.18 * longest)
    axes.set_yticks([])
    axes.grid(axis="y", visible=False)
    axes.set_title(
        f"Seconds per epoch{'' if timings.settings['full'] else ' of ImageNet'}, "
        f"{timings.settings['arch']} at {timings.settings['image_size']} px, "
        f"{precision}\nfilled: computing and communicating; hatched: lost to input; "
        "line: the repeats",
        fontsize=8,
        loc="left",
    )


def draw_scaling(timings: Timings, precision: str, axes, weak: bool) -> None:
    """Speed-up over one device against the number of devices, and the ideal."""
    counts = timings.settings["devices"]
    each = timings.settings["batch_size"]
    axes.plot(counts, counts, color=THEMES["--ink"][0], lw=1, ls="--")
    axes.annotate("ideal", (counts[-1], counts[-1]), ha="right", va="bottom")
    for strategy, marker in zip(LAUNCHERS, "osvD^", strict=True):
        if timings.no_replicas(strategy):
            continue
        points = []
        for count in counts:
            batch = count * each if weak else timings.together
            row = timings.rows.get(("device", count, batch, precision, strategy))
            share = row and timings.efficiency(row, each if weak else timings.together)
            if share:
                points.append((count, share * count))
                if count > 1:
                    ends = [share * count / one for one in (row.slowest, row.fastest)]
                    axes.plot([count] * 2, ends, **RANGE | {"marker": "_"})
        if points:
            line = {"color": COLOURS[strategy], "marker": marker, "alpha": 0.85}
            axes.plot(*zip(*points, strict=True), **line)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    kind = "GPUs" if timings.settings["device"] == "cuda" else "CPU processes"
    axes.set_xlabel(kind)
    title = f"{each} images each" if weak else f"{timings.together} images in all"
    axes.set_title(title, fontsize=8, loc="left")


def readme_table(timings: Timings) -> str:
    """The table in README.md."""
    return main_table(timings, timings.settings["precision"][0], FIRST)


def readme_words(timings: Timings) -> str:
    """What README.md says below its table."""
    words = conclusion(timings, timings.settings["precision"][0])
    return f"{words}\n\n{notes(timings)}\n\n{hardware(timings)}\n"


def write(folder: Path) -> None:
    """Write report.md, what README.md shows of it, and the figures."""
    timings = Timings(folder)
    (folder / "report.md").write_text(markdown(timings))
    (folder / "table.md").write_text(readme_table(timings))
    (folder / "words.md").write_text(readme_words(timings))
    try:
        draw(timings, folder)
    except ImportError:
        say("no figure: matplotlib is not installed (requirements-report.txt)")


def main() -> None:
    """Report on the folder in sys.argv."""
    if len(sys.argv) != 2:
        raise UserError("give one folder of timings")
    write(Path(sys.argv[1]))


if __name__ == "__main__":
    with exit_status():
        main()
