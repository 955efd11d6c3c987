"""Train on the sample data with every strategy, and show the results.

    python -m scripts.quickstart DATA OUTPUT       # quickstart.sh calls this

The script writes a folder for each run, and curves.png with the plots, to OUTPUT.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
LAUNCHERS = {
    "dataparallel": "python",
    "distributed": "torchrun",
    "multiprocessing_distributed": "mp.spawn",
    "apex_distributed": "torchrun",
    "horovod_distributed": "horovodrun",
}
# Mirrored digits would be wrong. --lr is for 256 images, so the rate for 64 is 0.05
EPOCHS = 4
RECIPE = (
    "--image-size 64 --global-batch-size 64 --lr 0.2 --warmup-epochs 1 "
    f"--schedule cosine --min-crop 0.5 --no-flip --epochs {EPOCHS}"
)
PANELS = ("train_loss", "val_loss", "val_top1")
LINE = "| {:27} | {:10} | {:<9} | {:7} | {:9} | {} |\n"


def unavailable(strategy: str) -> str | None:
    """Return why this machine cannot run a strategy, or None if it can."""
    apex = torch.cuda.is_available() and find_spec("apex")
    if strategy == "apex_distributed" and not apex:
        return "needs a GPU and Apex (docs/running.md)"
    if strategy == "horovod_distributed" and not find_spec("horovod"):
        return os.environ.get("HOROVOD_PROBLEM") or "Horovod is not installed"
    return None


def epochs_left(output: Path) -> int:
    """Return the number of epochs that the run in `output` still has to train."""
    file = output / "epochs.jsonl"
    return EPOCHS - (file.read_text().count("\n") if file.exists() else 0)


def train(strategy: str, data: str, output: Path, count: int) -> str:
    """Train with one strategy; return "done", or a message if it failed."""
    command = ["bash", str(ROOT / "scripts" / f"{strategy}.sh"), "--data", data]
    command += [*shlex.split(RECIPE), "--output", str(output), "--resume"]
    variables = {**os.environ, "NPROC": str(count)}
    status = subprocess.run(command, env=variables).returncode
    return f"failed with status {status}" if status else "done"


def render(runs: list[dict]) -> str:
    """Return a table of the runs, followed by their settings."""
    header = ("strategy", "launcher", "processes", "minutes", "val top-1", "status")
    table = LINE.format(*header) + LINE.format(*["---"] * len(header))
    for run in runs:
        cells, epochs = ["-", "-", "-"], run["epochs"]
        if epochs:
            minutes = sum(epoch["seconds"] for epoch in epochs) / 60
            cells = [run["processes"], f"{minutes:.1f}"]
            cells.append(f"{epochs[-1]['val_top1']:.1f} %")
        table += LINE.format(run["strategy"], run["launcher"], *cells, run["status"])
    return (
        f"{table}\nPyTorch {torch.__version__}, resnet18, {RECIPE}\n"
        "The minutes exclude startup and validation.\n"
    )


def draw(runs: dict[str, list[dict]]) -> Figure:
    """Return a plot of `runs`, which maps each run's name to its epochs' records.

    Later lines are thinner, so that identical runs all stay visible.
    """
    figure = Figure(figsize=(10, 4), dpi=150, facecolor="white", layout="constrained")
    for axes, name in zip(figure.subplots(1, 3), PANELS, strict=True):
        for number, records in enumerate(runs.values()):
            epochs = [record["epoch"] + 1 for record in records]
            values = [record[name] for record in records]
            axes.plot(epochs, values, linewidth=2 * (len(runs) - number))
        axes.set(title=name, xlabel="epoch")
        if "loss" in name:
            axes.set_yscale("log")
    figure.legend(axes.get_lines(), runs, loc="outside lower center", ncols=3)
    return figure


def main() -> None:
    """Train all strategies, print the table and draw the curves."""
    data, output = sys.argv[1], Path(sys.argv[2])
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 2
    count = max(n for n in (1, 2, 4, 8) if n <= devices)  # divides the batch of 64
    # Ctrl-C also reaches the launcher, which ends its processes; wait for it
    interrupted = []
    signal.signal(signal.SIGINT, lambda *_: interrupted.append(True))
    runs, waiting, trained, seconds = [], {}, 0, 0.0
    for strategy in LAUNCHERS:
        if not unavailable(strategy):
            waiting[strategy] = epochs_left(output / strategy)
    for number, (strategy, launcher) in enumerate(LAUNCHERS.items(), 1):
        title = f"\n== run {number} of {len(LAUNCHERS)}: {strategy}"
        if trained and strategy in waiting:
            minutes = seconds / trained * sum(waiting.values()) / 60
            title += f" (about {minutes:.1f} minutes left)"
        print(title, flush=True)
        run = {"strategy": strategy, "launcher": launcher}
        run["processes"] = 1 if strategy == "dataparallel" else count
        status = unavailable(strategy)
        if status:
            print(status, flush=True)
        else:
            began = time.monotonic()
            status = train(strategy, data, output / strategy, run["processes"])
            seconds += time.monotonic() - began
            trained += waiting.pop(strategy) - epochs_left(output / strategy)
        if interrupted:
            print("\ninterrupted; run the same command to continue", file=sys.stderr)
            sys.exit(130)
        epochs = []
        if status == "done":
            lines = (output / strategy / "epochs.jsonl").read_text().splitlines()
            epochs = [json.loads(line) for line in lines]
        runs.append({**run, "status": status, "epochs": epochs})
    print(f"\n{render(runs)}\nThe runs are in {output}/; delete it to train again.")
    done = {run["strategy"]: run["epochs"] for run in runs if run["epochs"]}
    if done:
        draw(done).savefig(output / "curves.png")
        print(f"{output}/curves.png shows the losses and accuracies of all runs.")
    sys.exit(any(run["status"].startswith("failed") for run in runs))


if __name__ == "__main__":
    main()
