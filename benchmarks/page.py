"""The tables of docs/performance.md, from the files under results/.

python -m benchmarks.page
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"


def markdown(header: list[str], rows: list[list]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def fill(page: str, parts: dict[str, str]) -> str:
    """The page with the text between <!-- NAME --> and <!-- /NAME --> made anew."""
    for name, text in parts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
        before, rest = page.split(begin)
        page = before + begin + text + end + rest.split(end)[1]
    return page


def results(name: str) -> dict:
    """What a benchmark wrote."""
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def machine(report: dict) -> str:
    """What the figures were measured on and with."""
    command = " ".join(report["argv"])
    short = re.sub(r"(\w{12})\w*", r"\1", str(report["commit"]))  # -dirty stays
    rounds = f", {report['rounds']} rounds" if "rounds" in report else ""
    return (
        f"\n`{command}`, {report['date']}, commit {short}{rounds}: "
        f"{report['cpu']}, {report['cpu_cores']} cores, Python {report['python']}, "
        f"PyTorch {report['torch']}, torchvision {report['torchvision']}.\n"
    )


def ratios(rows: dict[str, dict], unit: str, digits: int = 0) -> str:
    """Candidates, their medians, and the ratios to the first of them."""
    lines = []
    for name, row in rows.items():
        value, ratio = row["value"]["median"], row["ratio"]
        quartiles = f"{ratio['low']:.2f} to {ratio['high']:.2f}"
        lines.append(
            [name, f"{value:.{digits}f}", f"**{ratio['median']:.2f}** ({quartiles})"]
        )
    return markdown(["", unit, "ratio (quartiles)"], lines)


def like_first(rows: dict[str, dict]) -> dict[str, dict]:
    """The baseline, then the row that does the same work, then the others."""
    names = list(rows)
    like = [name for name in names if "normalised" in name]
    order = names[:1] + like + [name for name in names[1:] if name not in like]
    return {name: rows[name] for name in order}


def training_input() -> str:
    """Single training images on one core."""
    report = results("input")
    return ratios(like_first(report["training"]), "images/s") + machine(report)


def images() -> str:
    """What the measured files are like."""
    facts = results("input")["photographs"]
    return (
        f"{facts['images']} files of {facts['mean_pixels'] / 1000:.0f} thousand pixels "
        f"and {facts['mean_bytes'] / 1000:.0f} KB on average, 4:2:0.\n"
    )


def floor() -> str:
    """How near the pipeline comes to its decoder alone."""
    share = results("input")["share_of_floor"]
    low, high = share["low"], share["high"]
    return (
        "The pipeline with nvimgcodec, resize, mirroring and seed included, runs at "
        f"{share['median']:.0%} ({low:.0%} to {high:.0%}) of the speed of reading and "
        "decoding the crop alone.\n"
    )


def changes(part: str, unit: str, digits: int) -> Callable[[], str]:
    """One change after the other."""

    def table() -> str:
        report = results("changes")
        text = ratios(report[part], unit, digits)
        return text + machine(report) if part == "steps" else text

    return table


def validation_input() -> str:
    """Single validation images on one core."""
    return ratios(like_first(results("input")["validation"]), "images/s")


def loader() -> str:
    """One loader process per core."""
    return ratios(like_first(results("input")["loader"]), "images/s")


def index_memory() -> str:
    """What the index costs."""
    report = results("memory")
    rows = [
        [
            name,
            f"{report[kind]['parent_mib']:.0f}",
            f"{report[kind]['worker_mib'][0]:.0f}",
            f"{report[kind]['worker_mib'][-1]:.0f}",
            f"**{report[kind]['growth_mib']:.1f}**",
        ]
        for kind, name in (
            ("lists", "list of (path, label)"),
            ("packed", "packed"),
            ("unfrozen", "packed, without `gc.freeze()`"),
        )
    ]
    header = ["index", "training process", "loader process, first batch"]
    header += [f"after {report['epochs']} shuffled epochs", "growth"]
    return markdown(header, rows) + machine(report)


def step() -> str:
    """Steps against a bare loop."""
    report = results("step")
    tables = [
        f"{title}:\n\n{ratios(rows, 'steps/s', 2)}"
        for title, rows in report["steps"].items()
    ]
    return "\n".join(tables) + machine(report)


def training() -> str:
    """The whole training."""
    return ratios(results("step")["training"], "images/s", 1)


def startup() -> str:
    """From the launch to the first step."""
    report = results("startup")
    rows = [[name, f"{value:.2f}"] for name, value in report["parts"].items()]
    rows.append(["**in all**", f"**{report['seconds']:.2f}**"])
    return markdown(["part", "seconds"], rows) + machine(report)


TABLES: dict[str, Callable[[], str]] = {
    "images": images,
    "training input": training_input,
    "floor": floor,
    "validation input": validation_input,
    "loader": loader,
    "index memory": index_memory,
    "step": step,
    "training": training,
    "startup": startup,
    "image changes": changes("images", "images/s", 0),
    "left out": changes("left_out", "images/s", 0),
    "batch changes": changes("batches", "batches/s", 1),
    "step changes": changes("steps", "steps/s", 2),
}


def filled(page: str) -> str:
    """The page with its tables made anew."""
    return fill(page, {name: table() for name, table in TABLES.items()})


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
