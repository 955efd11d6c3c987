"""Compare the scripts' speed on one GPU with minimal and conventional loops.

    python -m benchmarks.gpu FILE [--rehearse]    # --rehearse: tiny sizes on a CPU
    python -m benchmarks.gpu FILE SCRIPT ROUNDS FLAGS...

Each measurement runs in its own process, the most important ones first. Measurements of
this commit that FILE already contains are kept. All end by GPU_CHECK_UNTIL (Unix time).
"""

import importlib
import json
import os
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

from benchmarks.comparison import commit, describe
from benchmarks.step import (
    BARE,
    STEPS,
    USUAL,
    bare_loop,
    measure_in_turns,
    usual_loop,
)
from common.data import DeviceLoader
from common.errors import one_line_errors


def compare_speed(name: str, rounds: str, *flags: str) -> dict:
    """Measure images per second for a script's train() and for equivalent loops."""
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


def plan(tiny: bool) -> list[tuple[str, int, list]]:
    """Return (name, time limit in seconds, arguments) for each measurement in order."""

    def speed(script: str, arch: str, kind: str, batch: int, *more: str) -> tuple:
        name = " ".join([script, arch, kind, "batch", str(batch), *more])
        arch, batch = ("resnet18", 4) if tiny else (arch, batch)
        flags = ["--synthetic", STEPS * batch, "-b", batch, "--arch", arch, *more]
        flags += ["--opt-level" if kind[0] == "O" else "--precision", kind]
        flags += ["--image-size", 32 if tiny else 224, "--output", "/tmp/gpu-speed"]
        return name, 240 if more else 120, [script, 1 if tiny else 3, *flags]

    ddp = "distributed"
    others = ("multiprocessing_distributed", "dataparallel", "horovod_distributed")
    return [
        speed(ddp, "resnet50", "bf16", 128),
        speed(ddp, "resnet50", "bf16", 256, "--compile"),
        *(speed(ddp, "resnet50", kind, 256) for kind in ("fp16", "fp32")),
        speed("apex_distributed", "resnet50", "O1", 128),
        *(speed(script, "resnet50", "bf16", 128) for script in others),
        *(speed(ddp, "resnet50", "bf16", batch) for batch in (64, 256, 512)),
        *(speed(ddp, "resnet18", "bf16", batch) for batch in (64, 256)),
    ]


def measured(words: list, seconds: float) -> dict:
    """Run one measurement in a separate process."""
    began, status = time.monotonic(), "not run"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        command = [sys.executable, "-m", "benchmarks.gpu", file, *words]
        try:
            ended = subprocess.run(
                list(map(str, command)), capture_output=True, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            line = f"not finished within {seconds:.0f} s"
        else:
            status = {0: "passed", 2: "skipped"}.get(ended.returncode, "failed")
            lines = [line for line in ended.stderr.splitlines() if line.strip()] or [""]
            line = next((line for line in lines if ": error: " in line), lines[-1])
        found = json.loads(file.read_text()) if status == "passed" else {}
    line, seconds = found.get("line", line), time.monotonic() - began
    return {"status": status, "line": line, "seconds": seconds, "found": found}


def in_words(rows: dict[str, dict]) -> str:
    """Format the measurements on one line."""
    words = []
    for title, row in rows.items():
        ratio = "{median:.3f} ({low:.3f} to {high:.3f})".format(**row["ratio"])
        words.append(f"{title} {row['value']['median']:.0f} images/s, ratio {ratio}")
    return "; ".join(words)


def everything(file: Path, tiny: bool) -> None:
    """Make the measurements that FILE lacks; write FILE after each of them."""
    old = json.loads(file.read_text())["rows"] if file.exists() else []
    here, until = commit() or "", float(os.environ.get("GPU_CHECK_UNTIL", "inf"))
    kept = {one["name"]: one for one in old if here and one["commit"] == here}
    report = {
        "device": "rehearsed on a CPU" if tiny else describe(torch.device("cuda")),
        "versions": {"torch": torch.__version__, "CUDA": torch.version.cuda},
        "rows": [],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    for name, limit, words in plan(tiny):
        row = {"status": "not run", "line": "time is up", "seconds": 0}
        if kept.get(name, row)["status"] == "passed":
            row = kept[name]
        elif (left := until - time.time()) > 20:
            row = measured(words, min(limit, left))
            print(f"{row['status']}: {name}: {row['line']}", flush=True)
        report["rows"].append({**row, "name": name, "commit": here})
        file.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(any(row["status"] in ("failed", "not run") for row in report["rows"]))


def main() -> None:
    """Run the measurements given on the command line."""
    file, *words = sys.argv[1:]
    if words in ([], ["--rehearse"]):
        everything(Path(file), bool(words))
    Path(file).write_text(json.dumps(compare_speed(*words), indent=1) + "\n")
    sys.stdout.flush()
    os._exit(0)  # main() did not finish, so skip the libraries' cleanup


if __name__ == "__main__":
    with one_line_errors():
        main()
