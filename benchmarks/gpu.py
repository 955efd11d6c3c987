"""Compare the scripts' speed on one GPU with minimal and conventional loops.

    python -m benchmarks.gpu FILE [--rehearse]    # --rehearse: tiny sizes on a CPU
    python -m benchmarks.gpu FILE SCRIPT ROUNDS FLAGS...
    python -m benchmarks.gpu FILE SCRIPT copies FLAGS...    # writes a trace, too

Each measurement runs in its own process, the most important ones first. Measurements of
this commit that FILE already contains are kept. All end by GPU_CHECK_UNTIL (Unix time).
"""

import contextlib
import gzip
import json
import os
import shutil
import signal
import socket
import statistics
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
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.step import (
    BARE,
    ROOT,
    STEPS,
    USUAL,
    bare_loop,
    measure_in_turns,
    timed,
    usual_loop,
)
from benchmarks.timings.plan import gpus, images
from common.data import DeviceLoader
from common.device import autocast_dtype, describe, machine_cores
from common.errors import UserError
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


def compare_speed(name: str, rounds: str, *flags: str) -> dict:
    """Measure images per second for a script's train() and for equivalent loops."""
    script, matrices = load_script(ROOT / f"{name}.py"), {}

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
            peak = matrix_flops(precision, loader.device)
            matrices["share"] = flops_per_image(args) / peak
        return found

    rows = measure_in_turns(
        script, int(rounds), loops, lambda: start_alone(script, list(flags))
    )
    line = in_words(rows)
    if matrices:  # of the matrix rate that this GPU reached, for the same precision
        matrices["share"] *= rows[f"{name}.py"]["value"]["median"]
        line += f"; {matrices['share']:.0%} of the matrix rate"
    return {"line": line, "rows": rows, **matrices}


def flops_per_image(args: Namespace) -> float:
    """Count the floating-point operations of a forward and a backward pass."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        batch = torch.empty(2, 3, args.image_size, args.image_size)
        torchvision.models.get_model(args.arch)(batch).sum().backward()
    return counter.get_total_flops() / len(batch)


def matrix_flops(precision: str, device: torch.device) -> float:
    """Measure a large matrix product in operations per second; fp32 uses TF32."""
    size = 8192 if device.type == "cuda" else 256
    dtype, before = autocast_dtype(precision), torch.get_float32_matmul_precision()
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    torch.set_float32_matmul_precision("high")
    measure = timed(lambda: [matrix @ matrix for _ in range(20)], 40 * size**3, device)
    fastest = max(measure() for _ in range(5))
    torch.set_float32_matmul_precision(before)
    return fastest


def trace_copies(file: Path, name: str, *flags: str) -> dict:
    """Train from JPEG files; measure how much of the copies' time overlaps kernels.

    Raises UserError on a CPU, where there are no copies.
    """
    script = load_script(ROOT / f"{name}.py")
    train, trace = script.train, file.with_suffix(".trace.json.gz")

    class Measured(Exception):
        pass

    def measure(args, rank, loader, model, state, *others) -> None:
        state.save = lambda: None
        train(args, rank, loader, model, state, *others)  # warm-up
        state.step = 0
        cuda = loader.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA] if cuda else None) as found:
            train(args, rank, loader, model, state, *others)
        found.export_chrome_trace(str(trace))
        raise Measured

    script.train = measure
    sizes = Namespace(data=None, modes=["jpeg"], processes=1, batch_size=64)
    with images(sizes) as data, contextlib.suppress(Measured):
        start_alone(script, ["--data", str(data), *flags])
    if not torch.cuda.is_available() or "cpu" in flags:
        raise UserError("the trace of a CPU has no copies")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    milliseconds, share = copies_in(events)
    line = f"{share:.0%} of {milliseconds:.1f} ms of copies overlap with kernels"
    return {"line": line, "share": share}


def copies_in(events: list[dict]) -> tuple[float, float]:
    """Return the copies' time in ms after the first kernel, and the share overlapped.

    Raises RuntimeError if a trace's events include no kernels or no copies.
    """
    spans: dict[str, list] = {"kernel": [], "gpu_memcpy": []}
    for event in events:
        kind = event.get("cat")
        if kind == "kernel" or kind == "gpu_memcpy" and "HtoD" in event["name"]:
            spans[kind].append((event["ts"], event["ts"] + event["dur"]))
    first = min(spans["kernel"], default=(0, 0))[0]
    copies = [span for span in spans["gpu_memcpy"] if span[0] > first]
    total = sum(end - start for start, end in copies)  # microseconds
    if not (spans["kernel"] and total):
        raise RuntimeError("the trace has no kernels, or no copies after the first one")
    return total / 1000, overlap(copies, spans["kernel"]) / total


def overlap(ones: list[tuple], others: list[tuple]) -> float:
    """Return how long a span of `ones` and one of `others`, (start, end), overlap."""
    changes = [
        (moment, kind, change)
        for kind, spans in enumerate((ones, others))
        for span in spans
        for moment, change in zip(span, (1, -1), strict=True)
    ]
    active, before, shared = [0, 0], 0.0, 0.0
    for moment, kind, change in sorted(changes):
        shared += (moment - before) * all(active)
        active[kind] += change
        before = moment
    return shared


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
        flags += ["--image-size", size, "--workers", 0, *common]
        return name, 240 if more else 120, [script, 1 if tiny else 3, *flags]

    ddp, common = "distributed", ["--device", device, "--output", "/tmp/gpu-speed"]
    others = ("multiprocessing_distributed", "dataparallel", "horovod_distributed")
    copies = ["-b", 4 if tiny else 128, "--image-size", size]
    copies += ["--max-steps", 40, "--print-interval", 40]
    copies += ["--arch", "resnet18" if tiny else "resnet50", *common]
    copies += ["--workers", machine_cores()]
    return [
        speed(ddp, "resnet50", "bf16", 128),
        speed(ddp, "resnet50", "bf16", 256, "--compile"),
        *(speed(ddp, "resnet50", kind, 256) for kind in ("fp16", "fp32")),
        speed(ddp, "resnet50", "bf16", 256, "--no-channels-last"),
        ("copies to the GPU", 120, [ddp, "copies", *copies]),
        speed("apex_distributed", "resnet50", "O1", 128),
        *(speed(script, "resnet50", "bf16", 128) for script in others),
        *(speed(ddp, "resnet50", "bf16", batch) for batch in (64, 256, 512)),
        *(speed(ddp, "resnet18", "bf16", batch) for batch in (64, 256)),
        *(speed(ddp, "resnet18", kind, 256) for kind in ("fp16", "fp32")),
    ]


def measured(words: list, seconds: float, keep: Path) -> dict:
    """Run one measurement in a separate process; copy its trace to `keep`."""
    began, samples = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "found.json"), Path(folder, "log")
        command = [sys.executable, "-m", "benchmarks.gpu", file, *words]
        with log.open("w") as out:
            process = subprocess.Popen(
                list(map(str, command)), stdout=out, stderr=out, start_new_session=True
            )
        while process.poll() is None and time.monotonic() < began + seconds:
            samples += gpus()
            time.sleep(0.5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        status = {0: "passed", 2: "skipped"}.get(process.wait(), "failed")
        lines = [line for line in log.read_text().splitlines() if line.strip()] or [""]
        line = next((line for line in lines if ": error: " in line), lines[-1])
        found = json.loads(file.read_text()) if status == "passed" else {}
        for trace in Path(folder).glob("*.trace.json.gz"):
            shutil.copy(trace, keep.with_suffix(".trace.json.gz"))
    taken = time.monotonic() - began
    if status == "passed":
        line = found["line"] + under_load(samples)
    elif status == "failed" and taken >= seconds:
        status, line = "not run", f"not finished within {seconds:.0f} s"
    return {"status": status, "line": line, "seconds": taken, "found": found}


def under_load(samples: list[dict[str, float]]) -> str:
    """Format the GPU's median clock and power while the process kept it busy."""
    power = [one["power.draw"] for one in samples]
    busy = [one for one in samples if one["power.draw"] > max(power) / 2]
    if not busy:
        return ""
    clock, watts = (
        statistics.median(one[name] for one in busy)
        for name in ("clocks.sm", "power.draw")
    )
    return f"; {clock:.0f} MHz, {watts:.0f} W"


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
            row = measured(words, min(limit, left), file)
            print(f"{row['status']}: {name}: {row['line']}", flush=True)
        report["rows"].append({**row, "name": name, "commit": here})
        file.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(any(row["status"] in ("failed", "not run") for row in report["rows"]))


def main() -> None:
    """Run the measurements given on the command line."""
    file, *words = sys.argv[1:]
    if words in ([], ["--rehearse"]):
        everything(Path(file), bool(words))
    name, rounds, *flags = words
    if rounds == "copies":
        found = trace_copies(Path(file), name, *flags)
    else:
        found = compare_speed(name, rounds, *flags)
    Path(file).write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.flush()
    os._exit(0)  # main() did not finish, so skip the libraries' cleanup


if __name__ == "__main__":
    with exit_status():
        main()
