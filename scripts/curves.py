"""Plot the losses and accuracies of runs in one image, from their epochs.jsonl files.

    python -m scripts.curves RUN...       # writes curves.png

RUN is the --output folder of a training run. Each run is drawn on top of the previous
runs, with a thinner line and smaller rings, so that identical runs all stay visible.
"""

import argparse
import json
from pathlib import Path

from common.errors import UserError, one_line_errors

try:
    from matplotlib.figure import Figure
except ImportError:
    Figure = None

PANELS = {
    "train_loss": "training loss",
    "val_loss": "validation loss",
    "val_top1": "validation accuracy (%)",
}


def read(run: Path) -> list[dict]:
    """Return the records of a run's epochs; raise a UserError if there are none."""
    file = run / "epochs.jsonl"
    try:
        records = [json.loads(line) for line in file.read_text().splitlines()]
        [record[name] for record in records for name in ("epoch", *PANELS)]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{file}: {type(error).__name__}: {error}") from None
    if not records:
        raise UserError(f"{file} is empty: no epoch has ended yet")
    return records


def draw(runs: dict[str, list[dict]]) -> Figure:
    """Return a figure of all runs; `runs` maps a name to the records of its epochs."""
    if not Figure:
        raise UserError("cannot draw the curves: pip install matplotlib")
    figure = Figure(figsize=(10, 4), dpi=150, facecolor="white", layout="constrained")
    for axes, name in zip(figure.subplots(1, 3), PANELS, strict=True):
        for number, records in enumerate(runs.values()):
            above = len(runs) - 1 - number
            points = [(record["epoch"] + 1, record[name]) for record in records]
            axes.plot(
                *zip(*points, strict=True),
                "o-",
                linewidth=1.3 + min(0.6, 5 / len(runs)) * above,
                markersize=4 + min(3.2, 18 / len(runs)) * above,
                markerfacecolor="none",
                markevery=1 + len(records) // 16,
            )
        axes.set(title=PANELS[name], xlabel="epoch")
        axes.grid(color="#dddddd")
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        if "loss" in name:
            axes.set_yscale("log")
    figure.legend(axes.get_lines(), runs, loc="outside lower center", ncols=3)
    return figure


def main() -> None:
    """Draw the runs given on the command line."""
    parser = argparse.ArgumentParser(description="Plot runs in one image, curves.png.")
    parser.add_argument("runs", nargs="+", metavar="RUN")
    runs = parser.parse_args().runs
    draw({run: read(Path(run)) for run in runs}).savefig("curves.png")
    print("curves.png")


if __name__ == "__main__":
    with one_line_errors():
        main()
