"""Time all strategies on one GPU and on all GPUs.

    python -m benchmarks.gpu FILE [--rehearse]    # --rehearse: tiny sizes on a CPU
    python -m benchmarks.gpu FILE STRATEGY PROCESSES FLAGS...
    python -m benchmarks.gpu --summary FOLDER     # write FOLDER/summary.json
    python -m benchmarks.gpu --check SUMMARY      # is anything missing or implausible?

Each measurement runs a launch script in its own process. The benchmark does not repeat
measurements of this commit that FILE already contains, and ends before the Unix time
in the variable GPU_CHECK_UNTIL.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import STRATEGIES, gpu_summary
from benchmarks.comparison import ROOT, commit, gpu_names
from benchmarks.processes import end
from benchmarks.timings.gate import VARIABLE
from common.errors import UserError, one_line_errors

LIBRARIES = {"apex_distributed": "apex.amp", "horovod_distributed": "horovod.torch"}
LIMIT = 240  # seconds per measurement
INTERVAL = 10  # steps between two printed speeds of a training run
WATCHED = ("clocks.sm", "power.draw", "temperature.gpu")  # MHz, W, degrees Celsius
ERROR = re.compile(r": error: |\b\w*(Error|Exception): \w")


def require_library(strategy: str) -> None:
    """Raise UserError if a strategy's library cannot be imported."""
    library = LIBRARIES.get(strategy, "torch")
    try:
        importlib.import_module(library)
    except (ImportError, RuntimeError) as error:
        raise UserError(f"{library} cannot be used: {error}") from None


def train(strategy: str, processes: str, *flags: str) -> dict:
    """Train with a launch script, one process per GPU; return the measurements."""
    require_library(strategy)
    samples = []
    with tempfile.TemporaryDirectory() as folder:
        log, run = Path(folder, "log.txt"), Path(folder, "run")
        words = ["bash", f"{ROOT}/scripts/{strategy}.sh", *flags, "--output", str(run)]
        variables = {**os.environ, "NPROC": processes, "PYTHON": sys.executable}
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_names()[: int(processes)])
        with log.open("w") as file:
            launcher = subprocess.Popen(words, env=variables, stdout=file)
            while launcher.poll() is None:
                samples += gpu_summary.nvidia_smi(WATCHED)
                time.sleep(1)
        if launcher.returncode:
            sys.exit(1)
        record = json.loads((run / "epochs.jsonl").read_text())
        speeds = re.findall(r", (\d+) images/s", log.read_text())
    names = ("steps", "images", "images_per_second", "data_wait", "peak_memory_mib")
    found = {"training_seconds": record["seconds"]}
    found |= {name: record[name] for name in names}
    found["intervals"] = [int(speed) for speed in speeds]
    for name in WATCHED:
        values = [sample[name] for sample in samples if sample[name] is not None]
        found[name] = max(values, default=None)
    return {"line": f"{record['images_per_second']:.0f} images/s", **found}


def plan(tiny: bool) -> list[tuple[dict, list]]:
    """Return each measurement's settings and command-line arguments."""
    most = 2 if tiny else torch.cuda.device_count()
    arch, share, size = ("resnet18", 4, 32) if tiny else ("resnet50", 64, 224)
    runs = []
    for strategy in STRATEGIES:
        level = "O1" if strategy == "apex_distributed" else "bf16" if tiny else "fp16"
        option = "--opt-level" if level == "O1" else "--precision"
        for processes in sorted({1, most}):
            batch = processes * share
            settings = {
                "name": f"{strategy} {arch} {level} {processes} x {share} images",
                "strategy": strategy,
                "arch": arch,
                "image_size": size,
                "precision": level,
                "processes": processes,
                "batch": batch,
            }
            flags = ["--arch", arch, "--image-size", size, option, level, "-b", batch]
            flags += ["--synthetic", INTERVAL * (3 if tiny else 12) * batch]
            flags += ["--epochs", 1, "--print-interval", INTERVAL]
            runs.append((settings, [strategy, processes, *flags]))
    return runs


def measured(words: list, seconds: float) -> dict:
    """Run a measurement in its own process, then kill any process that still runs."""
    began, status = time.monotonic(), "not run"
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "found.json"), Path(folder, "log.txt")
        command = [sys.executable, "-m", "benchmarks.gpu", file, *words]
        variables = {**os.environ, VARIABLE: folder}
        try:
            with log.open("w") as output:
                ended = subprocess.run(
                    list(map(str, command)),
                    env=variables,
                    stdout=output,
                    stderr=output,
                    timeout=seconds,
                )
        except subprocess.TimeoutExpired:
            line = f"not finished within {seconds:.0f} s"
        else:
            status = {0: "passed", 2: "skipped"}.get(ended.returncode, "failed")
            lines = [line for line in log.read_text().splitlines() if line.strip()]
            errors = [line for line in lines if ERROR.search(line)]
            line = (errors or lines[-1:] or [""])[0]
        finally:
            end(Path(folder))
        found = json.loads(file.read_text()) if status == "passed" else {}
    line, seconds = found.pop("line", line), time.monotonic() - began
    return {"status": status, "line": line, "seconds": seconds, "found": found}


def everything(file: Path, tiny: bool) -> None:
    """Run the measurements that FILE does not contain; update FILE after each one."""
    old = json.loads(file.read_text()) if file.exists() else []
    here, until = commit() or "", float(os.environ.get("GPU_CHECK_UNTIL", "inf"))
    kept = {one["name"]: one for one in old if here and one["commit"] == here}
    rows = []
    file.parent.mkdir(parents=True, exist_ok=True)
    for settings, words in plan(tiny):
        name = settings["name"]
        row = {"status": "not run", "line": "time is up", "seconds": 0, "found": {}}
        if kept.get(name, row)["status"] == "passed":
            row = kept[name]
        elif (left := until - time.time()) > 20:
            row = measured(words, min(LIMIT, left))
            print(f"{row['status']}: {name}: {row['line']}", flush=True)
        rows.append({**settings, **row, "commit": here})
        file.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(any(row["status"] in ("failed", "not run") for row in rows))


USAGE = "usage: python -m benchmarks.gpu --check summary.json, or FILE [--rehearse]"


def main() -> None:
    """Run measurements, or write or check a summary, as the command line says."""
    file, *words = sys.argv[1:] or [""]
    actions = {"--summary": gpu_summary.write, "--check": gpu_summary.check}
    if file in actions and len(words) == 1:
        actions[file](Path(words[0]))
    elif file[:1] in ("", "-") or (
        words and words[0] not in (*STRATEGIES, "--rehearse")
    ):
        raise UserError(USAGE)
    elif len(words) < 2:
        everything(Path(file), bool(words))
    else:
        Path(file).write_text(json.dumps(train(*words), indent=1) + "\n")


if __name__ == "__main__":
    with one_line_errors():
        main()
