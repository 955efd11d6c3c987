"""Write scripts/gpu_check.sh's results, the hardware and the versions to one file."""

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

import torch
import torchvision

from benchmarks.comparison import commit, gpu_names
from common.errors import UserError

FORMAT = 1
GPU = ("name", "driver_version", "memory.total", "power.limit", "clocks.max.sm")
TEXTS = ("name", "driver_version")  # the other fields are numbers
STATUSES = {"failure": "failed", "error": "not run", "skipped": "skipped"}


def nvidia_smi(fields: Sequence[str]) -> list[dict]:
    """Return {field: value} for each visible GPU, or [] if nvidia-smi cannot run.

    Numbers are in MiB, W, MHz and degrees Celsius; unreported values are None.
    """
    words = [
        "nvidia-smi",
        "-i",
        ",".join(gpu_names()),
        f"--query-gpu={','.join(fields)}",
    ]
    words += ["--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(words, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = []
    for line in asked.stdout.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(fields):
            row = dict(zip(fields, values, strict=True))
            numbers = {name: number(row[name]) for name in fields if name not in TEXTS}
            found.append({**row, **numbers})
    return found


def number(text: str) -> float | None:
    """Parse a number; return None for "[N/A]" and similar values."""
    try:
        return float(text)
    except ValueError:
        return None


def links() -> list[str]:
    """Return nvidia-smi's table of the links between the GPUs, without its legend."""
    try:
        words = ["nvidia-smi", "topo", "-m"]
        asked = subprocess.run(words, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    table = re.sub(r"\x1b\[[0-9;]*m", "", asked.stdout).partition("\n\n")[0]
    return [" ".join(line.split()) for line in table.splitlines()]


def machine() -> dict:
    """Describe the GPUs and the CPU."""
    gpus = nvidia_smi(GPU)
    for index in range(min(len(gpus), torch.cuda.device_count())):
        major, minor = torch.cuda.get_device_capability(index)
        gpus[index]["capability"] = major + minor / 10
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "gpus": gpus,
        "links": links(),
        "cpu": cpu[1] if cpu else platform.machine(),
        "cpu_cores": len(os.sched_getaffinity(0)),
    }


def versions() -> dict:
    """Return {name: version} for Python and the libraries (None: not installed)."""
    installed = {one.name: one.version for one in metadata.distributions()}
    nccl = None
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
        "NCCL": nccl,
        "horovod": installed.get("horovod"),
        "apex": installed.get("apex"),
    }


def test_rows(folder: Path) -> list[dict]:
    """Return each test's latest result, read from the files that pytest wrote."""
    found = {}
    for file in sorted(folder.glob("rows-*.xml")):
        for suite in ElementTree.parse(file).iter("testsuite"):
            here = suite.find("properties/property[@name='commit']")
            for case in suite.iter("testcase"):
                ended = [part for part in case if part.tag in STATUSES]
                text = [part.get("message", "").partition("\n")[0] for part in ended]
                for one in case.iter("property"):
                    text.append(f"{one.get('name')} {one.get('value')}")
                found[case.get("name")] = {
                    "name": case.get("name"),
                    "status": STATUSES[ended[0].tag] if ended else "passed",
                    "seconds": float(case.get("time")),
                    "line": "; ".join(text),
                    "commit": here.get("value") if here is not None else "",
                }
    return list(found.values())


def summarize(folder: Path) -> dict:
    """Return the summary of the results in a folder."""
    file = folder / "timings.json"
    return {
        "format": FORMAT,
        "commit": commit() or "",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
        "tests": test_rows(folder),
        "timings": json.loads(file.read_text()) if file.exists() else [],
    }


def write(folder: Path) -> None:
    """Write FOLDER/summary.json; count the results and print each that did not pass."""
    folder.mkdir(parents=True, exist_ok=True)
    summary, file = summarize(folder), folder / "summary.json"
    for part in ("tests", "timings"):
        statuses = [row["status"] for row in summary[part]]
        names = ("passed", *STATUSES.values())
        counts = ", ".join(f"{statuses.count(name)} {name}" for name in names)
        print(f"{part}: {counts}")
        for row in summary[part]:
            if row["status"] != "passed":
                print(f"  {row['status']}: {row['name']}: {row['line']}")
    file.write_text(json.dumps(summary, indent=1) + "\n")
    print(f"The summary is {file}; docs/measure.md describes how to send it.")


def problems(summary: dict) -> list[str]:
    """Return a line for each figure that is missing or implausible."""
    found, speeds = [], {}
    gpus = summary["machine"]["gpus"] or [{"memory.total": 0.0}]
    memory = min(gpu["memory.total"] for gpu in gpus)
    if not re.fullmatch("[0-9a-f]{40}", summary["commit"]):
        found.append(f"commit {summary['commit']}: undo or commit your changes")
    for row in (*summary["tests"], *summary["timings"]):
        if row["commit"] != summary["commit"]:
            found.append(f"{row['name']} is from commit {row['commit']}: start again")
        if row["status"] in ("failed", "not run"):
            found.append(f"{row['name']}: {row['status']}: {row['line']}")
    for row in summary["timings"]:
        got, name = row["found"], row["name"]
        speed = got.get("images_per_second", 0.0)
        speeds[row["strategy"], row["processes"]] = speed
        alone = speeds.get((row["strategy"], 1)) or speed
        if row["status"] == "passed" and not speed > 0:
            found.append(f"{name}: {speed} images/s")
        elif speed > 1.05 * row["processes"] * alone:
            found.append(f"{name}: {speed / alone:.2f} times as fast as one GPU")
        if got.get("peak_memory_mib", 0.0) > memory:
            found.append(f"{name}: more than the GPU's {memory:.0f} MiB")
        if got.get("images", 0) != got.get("steps", 0) * row["batch"]:
            found.append(f"{name}: {got['images']} images in {got['steps']} steps")
    if not {"distributed", "dataparallel"} <= {strategy for strategy, _ in speeds}:
        found.append("timings are missing: run scripts/gpu_check.sh --last-failed")
    return found


def check(file: Path) -> None:
    """Print what is missing or implausible; if anything is, exit with status 2."""
    try:
        found = problems(json.loads(file.read_text()))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{file}: {error!r}") from None
    for line in found:
        print(f"{file.name}: {line}", file=sys.stderr)
    if found:
        sys.exit(2)
    print(f"{file.name}: nothing is missing, and all figures are plausible")
