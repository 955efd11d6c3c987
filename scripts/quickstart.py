"""Train the sample data with every strategy through its launcher, and print a table.

    python scripts/quickstart.py DATA OUTPUT

Called by quickstart.sh. Interrupted, it goes on where it was when it is started again.
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
# Mirrored digits are other digits; --lr is per 256 images, so 0.05 at this batch
RECIPE = shlex.split(
    "--image-size 64 --global-batch-size 64 --lr 0.2 --warmup-epochs 1 "
    "--schedule cosine --min-crop 0.5 --no-flip --epochs 8"
)
COLUMNS = (
    "strategy",
    "launcher",
    "processes",
    "precision",
    "s/epoch",
    "images/s",
    "data wait",
    "val top-1",
    "status",
)


def train(strategy: str, data: str, output: Path) -> str:
    """Run one strategy to its end; returns "done", or why not."""
    print(f"\n== {strategy}", flush=True)
    problem = os.environ.get("HOROVOD_PROBLEM")
    if strategy == "horovod_distributed" and problem:
        print(problem)
        return problem
    command = [
        "bash",
        str(ROOT / "scripts" / f"{strategy}.sh"),
        "--data",
        data,
        *RECIPE,
    ]
    command += ["--output", str(output), "--resume", "auto"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    errors = []
    try:
        for line in process.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            if ": error: " in line:
                errors.append(line.split(": error: ", 1)[1].strip())
        status = process.wait()
    except KeyboardInterrupt:
        # The terminal sent the signal to the children too: they save and leave
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        process.stderr.close()
        process.wait()
        raise
    if status == 0:
        return "done"
    return errors[0] if errors else f"failed with exit status {status}"


def row(strategy: str, output: Path, status: str) -> list[str]:
    """One line of the table, from the run's report.json where there is one."""
    report_file = output / "report.json"
    if status != "done" or not report_file.exists():
        return [strategy, LAUNCHERS[strategy], *["-"] * 6, status]
    report = json.loads(report_file.read_text())
    return [
        strategy,
        LAUNCHERS[strategy],
        str(report["world_size"]),
        report["precision"],
        f"{report['seconds']:.1f}",
        f"{report['images_per_second']:.0f}",
        f"{report['data_wait_share']:.0%}",
        f"{report['val_top1']:.1f} %",
        status,
    ]


def table(rows: list[list[str]]) -> str:
    """Lay rows out as a Markdown table that also reads well as text."""
    lines = [list(COLUMNS), *rows]
    widths = [
        max(len(line[column]) for line in lines) for column in range(len(COLUMNS))
    ]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| "
        + " | ".join(
            cell.ljust(width) for cell, width in zip(line, widths, strict=True)
        )
        + " |"
        for line in lines
    )


def machine(reports: list[Path]) -> str:
    """Name the hardware and versions that the reports were made with."""
    if not reports:
        return "no run ended"
    report = json.loads(reports[0].read_text())
    return (
        f"{report['device_name']}, {report['cpu_cores']} cores, Python "
        f"{report['python']}, PyTorch {report['torch']}, torchvision "
        f"{report['torchvision']}; ResNet-18 at 64 px, 8 epochs of the digits; "
        "seconds, images/s and waiting are medians of epochs 2 to 8"
    )


def main() -> None:
    """Train all strategies and print the table."""
    data, output = sys.argv[1], Path(sys.argv[2])
    rows = []
    try:
        for strategy in LAUNCHERS:
            status = train(strategy, data, output / strategy)
            rows.append(row(strategy, output / strategy, status))
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
    reports = [path for path in output.glob("*/report.json")]
    print("\n" + table(rows) + "\n\n" + machine(reports))
    print(f"Runs are in {output}; delete it to train again.")
    failed = [line for line in rows if line[-1].startswith("failed")]
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
