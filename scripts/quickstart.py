"""Train on the sample data with every strategy and its launcher, and print a table.

    python scripts/quickstart.py DATA OUTPUT       # quickstart.sh calls this

If you interrupt it, the same command continues where it stopped. The results are in
OUTPUT/quickstart.json, and the table is in OUTPUT/quickstart.md.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAUNCHERS = {
    "dataparallel": "python",
    "distributed": "torchrun",
    "multiprocessing_distributed": "mp.spawn",
    "apex_distributed": "torchrun",
    "horovod_distributed": "horovodrun",
}
# A mirrored digit is a different character; --lr is per 256 images, so 0.05 per 64
RECIPE = shlex.split(
    "--image-size 64 --global-batch-size 64 --lr 0.2 --warmup-epochs 1 "
    "--schedule cosine --min-crop 0.5 --no-flip --epochs 8"
)
HEADER = ["strategy", "launcher", "processes", "precision", "minutes", "val top-1"]
HEADER += ["status"]


def train(strategy: str, data: str, output: Path) -> str:
    """Run one strategy; return "done", or why it did not finish."""
    print(f"\n== {strategy}", flush=True)
    problem = os.environ.get("HOROVOD_PROBLEM")
    if strategy == "horovod_distributed" and problem:
        print(problem)
        return problem
    command = ["bash", str(ROOT / "scripts" / f"{strategy}.sh"), "--data", data]
    command += [*RECIPE, "--output", str(output), "--resume", "auto"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, bufsize=1)
    errors, stopped = [], False

    def listen() -> int:
        nonlocal stopped
        for line in process.stderr:
            reports_stop = ": stopped after " in line
            if reports_stop or not stopped:  # the launcher's traceback follows
                print(line, end="", file=sys.stderr, flush=True)
            stopped |= reports_stop
            if ": error: " in line:
                errors.append(line.split(": error: ", 1)[1].strip())
        return process.wait()

    try:
        status = listen()
    except KeyboardInterrupt:
        # The terminal sent the signal to the children too; they save and exit
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        listen()
        raise
    if stopped:  # only the children received a signal
        raise KeyboardInterrupt
    if status == 0:
        return "done"
    reason = errors[0] if errors else "it printed no reason"
    missing = status == 2 and strategy in ("apex_distributed", "horovod_distributed")
    return reason if missing else f"failed ({status}): {reason}"


def row(run: dict) -> list[str]:
    """Return one row of the table."""
    cells = [run["strategy"], run["launcher"]]
    report = run["report"]
    if report is None:
        return [*cells, *["-"] * 4, run["status"]]
    return [
        *cells,
        str(report["world_size"]),
        report["precision"],
        f"{report['seconds'] * report['epochs'] / 60:.1f}",
        f"{report['val_top1']:.1f} %",
        run["status"],
    ]


def aligned(lines: list[list[str]]) -> str:
    """Format a header and its rows as a Markdown table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ""
    for line in [lines[0], ["-" * width for width in widths], *lines[1:]]:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        table += f"| {' | '.join(cells)} |\n"
    return table


def render(runs: list[dict]) -> str:
    """Return the table of runs, followed by the machine, versions and settings."""
    table = aligned([HEADER, *map(row, runs)])
    report = next((run["report"] for run in runs if run["report"]), None)
    if report is None:
        return table
    return (
        f"{table}\n{report['device_name']}, {report['cpu_cores']} cores; Python "
        f"{report['python']}, PyTorch {report['torch']}, torchvision "
        f"{report['torchvision']}.\n{report['arch']} at 64 px, global batch "
        f"{report['global_batch_size']}, {report['epochs']} epochs; the minutes "
        "exclude startup and validation.\n"
    )


def main() -> None:
    """Train all strategies and print the table."""
    data, output = sys.argv[1], Path(sys.argv[2])
    runs = []
    try:
        for strategy, launcher in LAUNCHERS.items():
            status = train(strategy, data, output / strategy)
            file = output / strategy / "report.json"
            report = json.loads(file.read_text()) if status == "done" else None
            run = {"strategy": strategy, "launcher": launcher, "status": status}
            runs.append({**run, "report": report})
    except KeyboardInterrupt:
        print("\ninterrupted; run the same command to continue", file=sys.stderr)
        sys.exit(130)
    output.mkdir(parents=True, exist_ok=True)
    (output / "quickstart.json").write_text(json.dumps(runs, indent=2) + "\n")
    (output / "quickstart.md").write_text(render(runs))
    print(f"\n{render(runs)}\nThe runs are in {output}/; delete it to train again.")
    sys.exit(any(run["status"].startswith("failed") for run in runs))


if __name__ == "__main__":
    main()
