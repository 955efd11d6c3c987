"""Time the strategies on one GPU and on all GPUs, and check the figures.

    python -m benchmarks.gpu FILE [--rehearse]    # --rehearse: tiny sizes on a CPU
    python -m benchmarks.gpu FILE train STRATEGY PROCESSES FLAGS...
    python -m benchmarks.gpu FILE compare SCRIPT ROUNDS FLAGS...
    python -m benchmarks.gpu --summary FOLDER     # write FOLDER/summary.json
    python -m benchmarks.gpu --check SUMMARY      # is anything impossible or missing?

"train" runs a launch script. "compare" alternates between a script's train() on one GPU
and minimal and conventional loops. Each measurement runs in its own process, the most
important ones first. Measurements of this commit that FILE already contains are kept.
All measurements end by GPU_CHECK_UNTIL (Unix time). docs/gpus.md describes the summary.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch
import torchvision
from torch import nn

from benchmarks import gpu_problems, gpu_summary
from benchmarks.comparison import ROOT, commit, gpu_names
from benchmarks.step import (
    BARE,
    STEPS,
    USUAL,
    bare_loop,
    measure_in_turns,
    usual_loop,
)
from benchmarks.timings.gate import VARIABLE
from benchmarks.timings.processes import end
from common.data import DeviceLoader
from common.errors import UserError, one_line_errors
from common.model import best_precision

LIBRARIES = {"apex_distributed": "apex.amp", "horovod_distributed": "horovod.torch"}
INTERVAL = 10  # steps between two printed speeds of a training run
LARGE = 40e9  # bytes of memory; GPUs with less get smaller batches
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
    """Train with a launch script, one process per GPU; return the recorded figures."""
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


def compare(name: str, rounds: str, *flags: str) -> dict:
    """Measure images per second for a script's train() and for equivalent loops."""
    require_library(name)
    script = importlib.import_module(name)

    def loops(args: Namespace, loader: DeviceLoader, model: nn.Module) -> dict:
        apex = name == "apex_distributed"
        alone = torchvision.models.get_model(args.arch)
        alone.to(loader.device, memory_format=torch.channels_last)
        if args.compile:
            alone.compile()
        bare = bare_loop(loader, alone, "fp16" if apex else args.precision)
        found = {BARE: without_amp(bare) if apex else bare}
        if name == "distributed":
            found[USUAL] = usual_loop(args, loader)
        return found

    def start() -> None:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        port = os.environ.setdefault("MASTER_PORT", "29511")
        sys.argv = [f"{name}.py", *flags]
        args = script.arguments()
        if name == "multiprocessing_distributed":
            args.local_rank, args.nprocs = 0, 1
            args.dist_url = f"tcp://127.0.0.1:{port}"
        script.main(args)

    rows = measure_in_turns(script, int(rounds), loops, start)
    return {"line": in_words(rows), "rows": rows}


def without_amp(work: Callable[[], None]) -> Callable[[], None]:
    """Wrap `work` so that it runs without the casts that Apex's O1 adds."""
    from apex import amp

    def run() -> None:
        with amp.disable_casts():
            work()

    return run


def plan(tiny: bool) -> list[tuple[dict, int, list]]:
    """Return (settings, time limit in seconds, arguments) for each measurement."""
    half, most, part = "bf16", torch.cuda.device_count() or 2, 1
    if not tiny:
        if best_precision(torch.device("cuda")) != "bf16":
            half = "fp16"
        if torch.cuda.get_device_properties(0).total_memory < LARGE:
            part = 4

    def one(
        kind: str,
        strategy: str,
        precision: str,
        batch: int,
        *more: str,
        arch: str = "resnet50",
        processes: int = 1,
    ) -> tuple:
        name = f"{kind} {strategy} {arch} {precision} {processes} x {batch} images"
        arch, batch, size = ("resnet18", 4, 32) if tiny else (arch, batch, 224)
        settings = {"name": " ".join([name, *more]), "kind": kind, "strategy": strategy}
        settings |= {"arch": arch, "image_size": size, "precision": precision}
        settings |= {"processes": processes, "batch": processes * batch}
        option = "--opt-level" if precision[0] == "O" else "--precision"
        flags = ["--arch", arch, "--image-size", size, option, precision, *more]
        flags += ["-b", settings["batch"]]
        if kind == "train":
            steps = INTERVAL * (3 if tiny else 12)
            flags += ["--synthetic", steps * settings["batch"]]
            flags += ["--epochs", 1, "--print-interval", INTERVAL]
            return settings, 240, [kind, strategy, processes, *flags]
        flags += ["--synthetic", STEPS * batch, "--output", "/tmp/gpu-speed"]
        limit = 240 if more else 120
        return settings, limit, [kind, strategy, 1 if tiny else 3, *flags]

    ddp = "distributed"
    strategies = {ddp: "fp16", "dataparallel": "fp16"}
    strategies |= {"multiprocessing_distributed": "fp16", "horovod_distributed": "fp16"}
    strategies |= {"apex_distributed": "O1"}
    runs = []
    for strategy, precision in strategies.items():
        for processes in sorted({1, most}):
            runs.append(one("train", strategy, precision, 64, processes=processes))
    others = ("multiprocessing_distributed", "dataparallel", "horovod_distributed")
    batches = {size: size // part for size in (64, 128, 256, 512)}
    return [
        *runs,
        one("compare", ddp, half, batches[128]),
        one("compare", ddp, half, batches[256], "--compile"),
        *(one("compare", ddp, kind, batches[256]) for kind in ("fp16", "fp32")),
        one("compare", "apex_distributed", "O1", batches[128]),
        *(one("compare", script, half, batches[128]) for script in others),
        *(one("compare", ddp, half, batches[size]) for size in (64, 512)),
        *(one("compare", ddp, half, batches[n], arch="resnet18") for n in (64, 256)),
    ]


def measured(words: list, seconds: float) -> dict:
    """Run a measurement in a separate process; end all processes that it leaves."""
    began, status = time.monotonic(), "not run"
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "found.json"), Path(folder, "log.txt")
        command = [sys.executable, "-m", "benchmarks.gpu", file, *words]
        variables = {**os.environ, VARIABLE: folder}
        if words[0] == "compare":
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_names()[:1])
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


def in_words(rows: dict[str, dict]) -> str:
    """Format the measurements on one line."""
    words = []
    for title, row in rows.items():
        ratio = "{median:.3f} ({low:.3f} to {high:.3f})".format(**row["ratio"])
        words.append(f"{title} {row['value']['median']:.0f} images/s, ratio {ratio}")
    return "; ".join(words)


def everything(file: Path, tiny: bool) -> None:
    """Take the measurements that FILE lacks; write FILE after each of them."""
    old = json.loads(file.read_text()) if file.exists() else []
    here, until = commit() or "", float(os.environ.get("GPU_CHECK_UNTIL", "inf"))
    kept = {one["name"]: one for one in old if here and one["commit"] == here}
    rows = []
    file.parent.mkdir(parents=True, exist_ok=True)
    for settings, limit, words in plan(tiny):
        name = settings["name"]
        row = {"status": "not run", "line": "time is up", "seconds": 0, "found": {}}
        if kept.get(name, row)["status"] == "passed":
            row = kept[name]
        elif (left := until - time.time()) > 20:
            row = measured(words, min(limit, left))
            print(f"{row['status']}: {name}: {row['line']}", flush=True)
        rows.append({**settings, **row, "commit": here})
        file.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(any(row["status"] in ("failed", "not run") for row in rows))


MEASUREMENTS = ["train"], ["compare"], ["--rehearse"]
USAGE = "usage: python -m benchmarks.gpu --check summary.json, or FILE [--rehearse]"


def main() -> None:
    """Run the measurements given on the command line, or check a summary."""
    file, *words = sys.argv[1:] or [""]
    actions = {"--summary": gpu_summary.write, "--check": gpu_problems.check}
    if file in actions and len(words) == 1:
        actions[file](Path(words[0]))
    elif file[:1] in ("", "-") or words[:1] not in ([], *MEASUREMENTS):
        raise UserError(USAGE)
    elif words in ([], ["--rehearse"]):
        everything(Path(file), bool(words))
    else:
        found = {"train": train, "compare": compare}[words[0]](*words[1:])
        Path(file).write_text(json.dumps(found, indent=1) + "\n")
        sys.stdout.flush()
        os._exit(0)  # main() did not finish, so skip the libraries' cleanup


if __name__ == "__main__":
    with one_line_errors():
        main()
