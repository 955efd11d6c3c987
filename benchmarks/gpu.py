"""Compare the scripts' speed on one GPU with minimal and conventional loops.

    python -m benchmarks.gpu FILE [--rehearse]    # --rehearse: tiny sizes on a CPU
    python -m benchmarks.gpu FILE SCRIPT ROUNDS FLAGS...

Each measurement runs in its own process, the most important ones first. Measurements of
this commit that FILE already contains are kept. All end by GPU_CHECK_UNTIL (Unix time).
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import torchvision
from torch import nn

from benchmarks.step import (
    BARE,
    ROOT,
    STEPS,
    USUAL,
    bare_loop,
    measure_in_turns,
    usual_loop,
)
from common.data import DeviceLoader
from common.device import describe
from common.log import commit
from launch.check import load_script
from launch.exits import exit_status
from launch.machines import use_loopback


def start_alone(script: ModuleType, flags: list[str]) -> None:
    """Run a script's main() in this process, as the only process of the job."""
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    variables |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(variables, MASTER_PORT=port)
    spawns = script.__name__ == "multiprocessing_distributed"
    args = script.arguments([*flags, *(["--nprocs", "1"] if spawns else [])])
    use_loopback()
    if spawns:
        args.local_rank, args.dist_url = 0, f"tcp://127.0.0.1:{port}"
    script.main(args)


def compare_speed(name: str, rounds: str, *flags: str) -> dict[str, dict]:
    """Measure images per second for a script's train() and for equivalent loops."""
    script = load_script(ROOT / f"{name}.py")

    def loops(args: Namespace, loader: DeviceLoader, model: nn.Module) -> dict:
        half = args.precision in ("fp16", "O1", "O2")
        precision = "fp16" if half else args.precision.replace("O0", "fp32")
        layout = torch.channels_last
        if args.no_channels_last or name == "apex_distributed":
            layout = torch.contiguous_format
        alone = torchvision.models.get_model(args.arch)
        alone.to(loader.device, memory_format=layout)
        if args.compile:
            alone.compile()
        bare = bare_loop(loader, alone, precision)
        found = {BARE: without_amp(bare) if args.precision == "O1" else bare}
        if name == "distributed":
            found[USUAL] = usual_loop(args, loader)
        return found

    return measure_in_turns(
        script, int(rounds), loops, lambda: start_alone(script, list(flags))
    )


def without_amp(work: Callable[[], None]) -> Callable[[], None]:
    """Wrap `work` so that it runs without the casts that Apex's O1 adds."""
    from apex import amp

    def run() -> None:
        with amp.disable_casts():
            work()

    return run


def plan(tiny: bool) -> list[tuple[str, int, list]]:
    """Return (name, time limit in seconds, arguments) for each measurement in order."""
    device, size = ("cpu", 32) if tiny else ("cuda", 224)

    def speed(script: str, arch: str, kind: str, batch: int, *more: str) -> tuple:
        name = " ".join([script, arch, kind, "batch", str(batch), *more])
        arch, batch = ("resnet18", 4) if tiny else (arch, batch)
        flags = ["--synthetic", STEPS * batch, "-b", batch, "--arch", arch, *more]
        flags += ["--opt-level" if kind[0] == "O" else "--precision", kind]
        flags += ["--image-size", size]
        flags += ["--device", device, "--workers", 0, "--output", "/tmp/gpu-speed"]
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
        *(speed(ddp, "resnet18", kind, 256) for kind in ("fp16", "fp32")),
    ]


def measured(words: list, seconds: float) -> dict:
    """Run one measurement in a separate process."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "found.json"), Path(folder, "log")
        command = [sys.executable, "-m", "benchmarks.gpu", file, *words]
        with log.open("w") as out:
            process = subprocess.Popen(
                list(map(str, command)), stdout=out, stderr=out, start_new_session=True
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        status = {0: "passed", 2: "skipped"}.get(process.wait(), "failed")
        lines = [line for line in log.read_text().splitlines() if line.strip()] or [""]
        line = next((line for line in lines if ": error: " in line), lines[-1])
        found = json.loads(file.read_text()) if status == "passed" else {}
    taken = time.monotonic() - began
    if status == "passed":
        line = in_words(found)
    elif status == "failed" and taken >= seconds:
        status, line = "not run", f"not finished within {seconds:.0f} s"
    return {"status": status, "line": line, "seconds": taken, "found": found}


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
    here, until = commit(), float(os.environ.get("GPU_CHECK_UNTIL", "inf"))
    kept = {one["name"]: one for one in old if one["commit"] == here}
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
    found = compare_speed(*words)
    Path(file).write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.flush()
    os._exit(0)  # main() did not finish, so skip the libraries' cleanup


if __name__ == "__main__":
    with exit_status():
        main()
