"""Tables of docs/multinode.md, from the figures that tests wrote down.

bash scripts/test.sh -k multihost --full --figures    # writes results/multinode.json
python tests/multinode.py                             # rewrites what stands between the markers
"""

import json

from reliability import ROOT, group, machine

from benchmarks.page import fill, markdown

PAGE = ROOT / "docs" / "multinode.md"
RESULTS = ROOT / "results" / "multinode.json"
NOT_RUN = "(Not run yet.)\n"


def status(code: int | None) -> str:
    """An exit status, or the signal that ended a launcher."""
    if code is None:
        return "launcher stays"
    return f"killed ({-code})" if code < 0 else str(code)


def cell(values: list | None) -> str:
    """Statuses of the launchers, and seconds until every process was gone."""
    if values is None:
        return "-"
    *codes, seconds = values
    return "; ".join(filter(None, [", ".join(map(status, codes)), f"{seconds:.0f} s"]))


def failures(report: dict) -> str:
    """What ends a job over two hosts, by engine."""
    cells = {}
    for name, values in group(report, "multihost / ").items():
        event, engine = name.split(" / ")
        if event not in ("wrong", "restart", "rounding"):
            cells[event, engine] = values
    if not cells:
        return NOT_RUN
    events = list(dict.fromkeys(event for event, _ in cells))
    used = list(dict.fromkeys(engine for _, engine in cells))
    rows = [[e, *(cell(cells.get((e, engine))) for engine in used)] for e in events]
    return markdown(["", *used], rows)


def one_column(kind: str, header: str):
    """A table of one figure a row."""

    def table(report: dict) -> str:
        rows = [
            [name, cell(values)]
            for name, values in group(report, f"multihost / {kind} / ").items()
        ]
        return markdown(["", header], rows) if rows else NOT_RUN

    return table


def rounding(report: dict) -> str:
    """The largest difference of a weight at 2 x 2 processes."""
    values = [v[0] for v in group(report, "multihost / rounding / ").values()]
    if not values:
        return NOT_RUN
    return f"{len(values)} engines, largest difference {max(values):.1e}.\n"


TABLES = {
    "rounding": rounding,
    "machine": lambda report: machine(report) or NOT_RUN,
    "failures": failures,
    "restarts": one_column("restart", "statuses; seconds"),
    "wrong": one_column("wrong", "statuses; seconds"),
}


def filled(page: str, report: dict) -> str:
    """The page with its tables made anew."""
    return fill(page, {name: table(report) for name, table in TABLES.items()})


if __name__ == "__main__":
    page, report = PAGE.read_text(), json.loads(RESULTS.read_text())
    PAGE.write_text(filled(page, report))
