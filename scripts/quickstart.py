"""Train on the sample data with every strategy and its launcher; show the results.

    python -m scripts.quickstart DATA OUTPUT       # quickstart.sh calls this

OUTPUT/quickstart.json has the results, quickstart.md a table, curves.png the plots.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
import torchvision

from common.errors import UserError
from scripts import curves

ROOT = Path(__file__).resolve().parent.parent
LAUNCHERS = {
    "dataparallel": "python",
    "distributed": "torchrun",
    "multiprocessing_distributed": "mp.spawn",
    "apex_distributed": "torchrun",
    "horovod_distributed": "horovodrun",
}
# Do not mirror digits: they would change. --lr is per 256 images, so 0.05 per 64
RECIPE = (
    "--image-size 64 --global-batch-size 64 --lr 0.2 --warmup-epochs 1 "
    "--schedule cosine --min-crop 0.5 --no-flip --epochs 8"
)
LINE = "| {:27} | {:10} | {:<9} | {:7} | {:9} | {} |\n"


def train(strategy: str, data: str, output: Path, processes: int) -> str:
    """Run one strategy; return "done", or why it did not finish."""
    print(f"\n== {strategy}", flush=True)
    apex = torch.cuda.is_available() and find_spec("apex")
    if strategy == "apex_distributed" and not apex:
        return "needs a GPU and Apex (docs/running.md)"
    if strategy == "horovod_distributed" and not find_spec("horovod"):
        return os.environ.get("HOROVOD_PROBLEM") or "Horovod is not installed"
    command = ["bash", str(ROOT / "scripts" / f"{strategy}.sh"), "--data", data]
    command += [*shlex.split(RECIPE), "--output", str(output / strategy), "--resume"]
    variables = {**os.environ, "NPROC": str(processes)}
    status = subprocess.run(command, env=variables).returncode
    return f"failed with status {status}" if status else "done"


def environment() -> dict[str, str]:
    """Return the hardware, versions and commit of this run."""
    name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    device = f"{name[1] if name else 'CPU'}, {len(os.sched_getaffinity(0))} cores"
    if gpus := torch.cuda.device_count():
        device = f"{gpus} x {torch.cuda.get_device_name()}"
    commit = f"git -C {shlex.quote(str(ROOT))} rev-parse HEAD 2>/dev/null"
    return {
        "device": device,
        "Python": sys.version.split()[0],
        "PyTorch": torch.__version__,
        "torchvision": torchvision.__version__,
        "commit": subprocess.getoutput(commit),
    }


def render(report: dict) -> str:
    """Return the table of runs, followed by the machine, versions and settings."""
    header = ("strategy", "launcher", "processes", "minutes", "val top-1", "status")
    table = LINE.format(*header) + LINE.format(*["---"] * len(header))
    for run in report["runs"]:
        cells, epochs = ["-", "-", "-"], run["epochs"]
        if epochs:
            minutes = sum(epoch["seconds"] for epoch in epochs) / 60
            cells = [run["processes"], f"{minutes:.1f}"]
            cells.append(f"{epochs[-1]['val_top1']:.1f} %")
        table += LINE.format(run["strategy"], run["launcher"], *cells, run["status"])
    return (
        f"{table}\n{report['device']}; Python {report['Python']}, "
        f"PyTorch {report['PyTorch']}.\nresnet18, {report['recipe']}\n"
        "The minutes exclude startup and validation.\n"
    )


def main() -> None:
    """Train all strategies, print the table and draw the curves."""
    data, output = sys.argv[1], Path(sys.argv[2])
    available = torch.cuda.device_count() or 2
    # The global batch of 64 must be divisible by the number of processes
    count = max(number for number in (1, 2, 4, 8) if number <= available)
    # Ctrl-C also reaches the launcher, which ends its processes; wait for it
    interrupted = []
    signal.signal(signal.SIGINT, lambda *_: interrupted.append(True))
    runs = []
    for strategy, launcher in LAUNCHERS.items():
        processes = 1 if strategy == "dataparallel" else count
        status = train(strategy, data, output, processes)
        if interrupted:
            print("\ninterrupted; run the same command to continue", file=sys.stderr)
            sys.exit(130)
        run = {"strategy": strategy, "launcher": launcher, "processes": processes}
        epochs = curves.read(output / strategy) if status == "done" else []
        runs.append({**run, "status": status, "epochs": epochs})
    report = {**environment(), "recipe": RECIPE, "runs": runs}
    output.mkdir(parents=True, exist_ok=True)
    (output / "quickstart.json").write_text(json.dumps(report, indent=2) + "\n")
    (output / "quickstart.md").write_text(render(report))
    print(f"\n{render(report)}\nThe runs are in {output}/; delete it to train again.")
    if done := {run["strategy"]: run["epochs"] for run in runs if run["epochs"]}:
        try:
            curves.draw(done).savefig(output / "curves.png")
            print(f"{output}/curves.png shows the losses and accuracies of all runs.")
        except UserError as error:  # no matplotlib
            print(error)
    sys.exit(any(run["status"].startswith("failed") for run in runs))


if __name__ == "__main__":
    main()
