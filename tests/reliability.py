"""Tables of docs/reliability.md, from the figures that tests wrote down.

bash scripts/test.sh --full --figures    # writes results/reliability.json
bash scripts/test.sh --mutations         # writes results/mutations.json
python tests/reliability.py              # rewrites what is between the markers
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.page import fill, markdown  # noqa: E402

PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "results" / "reliability.json"
MUTATIONS = ROOT / "results" / "mutations.json"


def machine(report: dict) -> str:
    """Where the figures come from: a long run, and tests that were run again.

    What was run in parts of one commit is one run.
    """
    runs: dict[tuple, dict] = {}
    for session in report["sessions"]:
        names = ("form", "commit", "cpu", "cpu_cores", "python", "torch", "horovod")
        counts = dict.fromkeys(("passed", "failed", "minutes"), 0)
        key = tuple(session[name] for name in names)
        run = runs.setdefault(key, {**session, **counts})
        for name in counts:
            run[name] += session[name]
    return "".join(
        f"- {session['form']} form: {session['passed']} tests passed, {session['failed']} failed, in "
        f"{session['minutes']:.0f} minutes on {session['cpu_cores']} cores of an "
        f"{session['cpu']}; Python {session['python']}, PyTorch {session['torch']}, Horovod "
        f"{session['horovod']}; commit {session['commit'][:12]}\n"
        for session in runs.values()
    )


def group(report: dict, prefix: str) -> dict:
    """The figures whose name begins with `prefix`, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in report["figures"].items()
        if name.startswith(prefix)
    }


def weights(report: dict) -> str:
    """Differences from dataparallel on the whole batch."""
    momenta = group(report, "momentum, ")
    rows = [
        [
            name.split(", ")[0],
            name.split(", ")[1].split()[0],
            f"{w:.1e}",
            f"{momenta[name]:.1e}",
        ]
        for name, w in sorted(group(report, "weights, ").items())
    ]
    return markdown(["strategy", "processes", "weights", "momentum"], rows)


def validation(report: dict) -> str:
    """Validations that were compared with one process, and their largest error."""
    errors = group(report, "val loss, ")
    return (
        f"{41 * len(errors)} validations compared ({len(errors)} combinations of strategy, "
        "number of processes and batch size, 41 sizes each): counts all equal, largest "
        f"difference of the loss {max(errors.values()):.1e}.\n"
    )


def kills(report: dict) -> str:
    """Kills survived."""
    in_writes, halves = report["figures"]["kills in a write"]
    lives = group(report, "killed again and again / ")
    chains = group(report, "resumed to the bit / ")
    return (
        f"- {in_writes} kills of a process that does nothing but save: {halves} came while "
        "a file was half written. After each, a whole checkpoint was there, none older than "
        "the last save that had returned.\n"
        f"- {len(lives)} runs killed again and again at random moments, "
        f"{sum(map(len, lives.values()))} times in all, and resumed each time: every one "
        "ended with the bits of the run that was left alone.\n"
        f"- {len(chains)} runs through the launchers, killed once, resumed, stopped once by "
        "SIGTERM to one process, resumed: the same bits.\n"
    )


def ends(report: dict) -> str:
    """What ends a run, by launcher."""
    cells = {tuple(name.split(" / ")): v for name, v in group(report, "end / ").items()}
    ways = list(dict.fromkeys(way for way, _ in cells))
    events = list(dict.fromkeys(event for _, event in cells))
    rows = []
    for event in events:
        row = [event]
        for way in ways:
            status, seconds, saved = cells.get((way, event), (None, None, None))
            text = f"{status}, {seconds:.0f} s" if status is not None else "-"
            row.append(f"**{text}**" if saved else text)
        rows.append(row)
    return markdown(["", *ways], rows)


def mutations(report: dict) -> str:
    """The mistakes that were tried, and what became of them."""
    tried = report["mutations"]
    survived = sum(mutation["survived"] for mutation in tried)
    rows = [
        [
            mutation["name"],
            mutation["file"],
            ", ".join(test.split("::")[-1].split("[")[0] for test in mutation["tests"]),
            "survived" if mutation["survived"] else "seen",
        ]
        for mutation in tried
    ]
    return (
        f"{len(tried)} mistakes, {survived} survived; {report['minutes']:.0f} minutes on "
        f"{report['cpu_cores']} cores, commit {report['commit'][:12]}.\n\n"
        "<details><summary>All of them</summary>\n\n"
        + markdown(["mistake", "made in", "tests that have to see it", ""], rows)
        + "\n</details>\n"
    )


TABLES: dict[str, Callable[[dict], str]] = {
    "machine": machine,
    "weights": weights,
    "validation": validation,
    "kills": kills,
    "ends": ends,
}


def filled(page: str, report: dict) -> str:
    """The page with what is between its markers made again."""
    page = fill(page, {name: table(report) for name, table in TABLES.items()})
    return fill(page, {"mutations": mutations(json.loads(MUTATIONS.read_text()))})


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), json.loads(RESULTS.read_text())))
