"""Speed on one GPU: the scripts against bare loops, a network alone, the way of JPEGs.

    python -m benchmarks.gpu FILE [--rehearse]    # all of it; on a CPU at tiny sizes
    python -m benchmarks.gpu FILE speed SCRIPT ROUNDS FLAGS...
    python -m benchmarks.gpu FILE network VARIANT DEVICE SIZE BATCH...    a ResNet-50
    python -m benchmarks.gpu FILE input DEVICE FLAGS...

Each measurement has a process of its own; the most important ones come first. FILE
keeps what was measured at this commit; nothing begins after the second GPU_CHECK_UNTIL.
"""

import contextlib
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import usual_training
from benchmarks.comparison import compared, interleave, spread
from benchmarks.photographs import write_photographs
from benchmarks.step import STEPS, bare_loop
from common.data import DeviceLoader
from common.device import describe, peak_memory_mib
from common.errors import exit_status
from common.launch import Watchdog
from launch.machines import use_loopback
from common.report import commit

ROOT = Path(__file__).resolve().parent.parent
BARE, USUAL, USUAL_SAME = "bare loop", "usual, fp32", "usual, same precision"
QUERY = "clocks.sm,power.draw,utilization.gpu"  # MHz, W, %


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def start_alone(script, flags: list[str]) -> None:
    """Run main() of a script in this process, the only one of its job."""
    name = script.__name__
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    variables |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(variables, MASTER_PORT=port)
    spawns = name == "multiprocessing_distributed"
    args = script.arguments([*flags, *(["--nprocs", "1"] if spawns else [])])
    use_loopback()
    if spawns:
        args.local_rank, args.dist_url = 0, f"tcp://127.0.0.1:{port}"
    script.main(args)


# --- a script against a bare loop ---


def usual_loop(args: Namespace, loader: DeviceLoader, dtype: torch.dtype) -> Callable:
    """Steps as usual scripts take them: floats on the host, figures read at once."""
    device = loader.device
    model = torchvision.models.get_model(args.arch).to(device)
    if torch.distributed.is_initialized():
        gpus = [device.index] if device.type == "cuda" else None
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=gpus)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=1e-4)
    images, labels = loader.images.cpu().contiguous(), loader.labels.cpu()
    if device.type == "cuda":
        images, labels = images.pin_memory(), labels.pin_memory()

    def run() -> None:
        for _ in range(STEPS):
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                usual_training.train_step(model, optimizer, images, labels, device)

    return run


def compare_speed(name: str, rounds: str, *flags: str) -> dict:
    """Images per second of a script's train() and of loops that do the same, in turns.

    Runs main() of the script up to its train(), in whose place it measures.
    """
    script = importlib.import_module(name)
    train, found = script.train, {}

    def measure(args: Namespace, rank: int, loader: DeviceLoader, *others) -> None:
        for number in Watchdog.SIGNALS:  # a benchmark just ends
            signal.signal(number, signal.SIG_DFL)
        state = others[1]
        state.save = lambda: None  # no part of a step

        def ours() -> None:
            state.step = 0
            train(args, rank, loader, *others)

        half = args.precision in ("fp16", "O1", "O2")
        precision = "fp16" if half else args.precision.replace("O0", "fp32")
        layout = torch.channels_last
        if args.no_channels_last or name == "apex_distributed":
            layout = torch.contiguous_format
        bare = bare_loop(args, loader, precision, layout, wrap=False)
        loops = {BARE: bare, f"{name}.py": ours}
        if args.precision == "O1":
            loops[BARE] = without_amp(bare)
        if name == "distributed":
            loops[USUAL] = usual_loop(args, loader, torch.float32)
            if precision == "bf16":
                loops[USUAL_SAME] = usual_loop(args, loader, torch.bfloat16)
        images = STEPS * args.global_batch_size
        works = {
            title: timed(loop, images, loader.device) for title, loop in loops.items()
        }
        found.update(compared(interleave(works, int(rounds)), BARE))
        raise Measured

    script.train = measure
    with contextlib.suppress(Measured):
        start_alone(script, list(flags))
    return {"rows": found}


class Measured(Exception):
    """All is measured; what main() would do after training need not be done."""


def without_amp(work: Callable[[], None]) -> Callable[[], None]:
    """The work as it is where Apex's O1 has not patched PyTorch's functions."""
    from apex import amp

    def run() -> None:
        with amp.disable_casts():
            work()

    return run


def timed(work: Callable[[], None], images: int, device: torch.device) -> Callable:
    """Measures images per second of work()."""

    def measure() -> float:
        synchronise(device)
        began = time.perf_counter()
        work()
        synchronise(device)
        return images / (time.perf_counter() - began)

    return measure


# --- the network itself ---


def matrix_rate(device: torch.device, size: int = 8192, repeats: int = 10) -> float:
    """Bfloat16 operations per second of a product of square matrices, random data."""
    if device.type == "cpu":
        size, repeats = 512, 2
    one, other = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        one @ other
    measure = timed(lambda: [one @ other for _ in range(repeats)], repeats, device)
    return measure() * 2 * size**3


def network_speed(variant: str, device_name: str, size: str, *batches: str) -> dict:
    """Speed, memory and share of the matrix rate of a ResNet-50 in bf16, channels_last.

    `variant` is eager, or a mode of torch.compile.
    """
    device = torch.device(device_name)
    torch.backends.cudnn.benchmark = True
    rate = matrix_rate(device)
    found: dict = {"matrix_tflops": rate / 1e12, "batches": {}}
    for batch in map(int, batches):
        try:
            found["batches"][batch] = one_batch(variant, device, int(size), batch, rate)
        except torch.OutOfMemoryError as error:
            found["batches"][batch] = {"problem": str(error).splitlines()[0]}
    return found


def one_batch(
    variant: str, device: torch.device, size: int, batch: int, rate: float
) -> dict:
    """Measure one batch size."""
    model = torchvision.models.resnet50().to(device, memory_format=torch.channels_last)
    images = torch.randn(batch, 3, size, size, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9, weight_decay=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            outputs = model(images)
        F.cross_entropy(outputs.float(), labels).backward()
        optimizer.step()

    with FlopCounterMode(display=False) as counter:
        step()
    if variant != "eager":
        model.compile(mode=variant)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    repeats = 10 if device.type == "cuda" else 1
    for _ in range(1 + repeats // 4):
        step()
    measure = timed(lambda: [step() for _ in range(repeats)], repeats * batch, device)
    speed = sorted(measure() for _ in range(3))[1]
    work = counter.get_total_flops() / batch
    return {
        "images_per_second": speed,
        "gflop_per_image": work / 1e9,
        "share_of_matrix_rate": speed * work / rate,
        "peak_memory_mib": peak_memory_mib(device),
    }


# --- from files to the network ---


def input_share(device: str, *flags: str) -> dict:
    """Images per second of distributed.py from JPEG files, and without files.

    Whole launches of two epochs, of which the second one counts, in turns.
    """
    images, copies, rounds = (64, 0, 1) if device == "cpu" else (256, 39, 2)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        write_photographs(data, images, 16, classes=8)
        for file in list(data.glob("train/*/*")):
            for number in range(copies):  # more files, whose bytes stay in memory
                file.with_name(f"{file.stem}-{number}.JPEG").symlink_to(file.name)
        environment = {**os.environ, "NPROC": "1", "PYTHON": sys.executable}

        def measure(*source: object) -> float:
            output = Path(tempfile.mkdtemp(dir=folder))
            words = ["bash", ROOT / "scripts" / "distributed.sh", *source, *flags]
            words += ["--device", device, "--epochs", 2, "--output", output]
            subprocess.run(list(map(str, words)), check=True, env=environment)
            *_, record = map(json.loads, (output / "epochs.jsonl").open())
            return record["images_per_second"]

        works = {
            "device": lambda: measure("--synthetic", images * (1 + copies)),
            "files": lambda: measure("--data", data),
        }
        return {"rows": compared(interleave(works, rounds), "device")}


# --- all of it ---


def plan(tiny: bool) -> list[tuple[str, int, list]]:
    """(name, most seconds, arguments of a call) of each measurement, in their order."""
    device, size = ("cpu", 32) if tiny else ("cuda", 224)

    def common(arch: str, batch: int) -> list:
        arch, batch = ("resnet18", 4) if tiny else (arch, batch)
        return ["--arch", arch, "--image-size", size, "-b", batch]

    def speed(script: str, arch: str, kind: str, batch: int, *more: str) -> tuple:
        flags = ["--synthetic", STEPS * (4 if tiny else batch), *common(arch, batch)]
        flags += ["--opt-level" if kind[0] == "O" else "--precision", kind, *more]
        flags += ["--device", device, "--workers", 0, "--output", "/tmp/gpu-speed"]
        name = " ".join([script, arch, kind, "batch", str(batch), *more])
        return name, 240 if more else 120, ["speed", script, 1 if tiny else 3, *flags]

    def network(variant: str, limit: int, *batches: int) -> tuple:
        words = ["network", variant, device, size, *([2] if tiny else batches)]
        return f"network alone, bf16, {variant}", limit, words

    def files(arch: str) -> tuple:
        return f"from files, {arch}", 240, ["input", device, *common(arch, 256)]

    ddp = "distributed"
    others = ("multiprocessing_distributed", "dataparallel", "horovod_distributed")
    modes = ("default", "reduce-overhead")
    return [
        network("eager", 90, 64, 128, 256, 512),
        speed(ddp, "resnet50", "bf16", 128),
        *(files(arch) for arch in ("resnet50", "resnet18")),
        speed(ddp, "resnet50", "bf16", 256, "--compile"),
        *(speed(ddp, "resnet50", kind, 256) for kind in ("fp16", "fp32")),
        speed("apex_distributed", "resnet50", "O1", 128),
        *(speed(script, "resnet50", "bf16", 128) for script in others),
        *(speed(ddp, "resnet50", "bf16", batch) for batch in (64, 256, 512)),
        *(speed(ddp, "resnet18", "bf16", batch) for batch in (64, 128, 256, 512)),
        *(speed(ddp, "resnet18", kind, 256) for kind in ("fp16", "fp32")),
        *(network(mode, 300, 128) for mode in modes[: 1 if tiny else 2]),
    ]


def nvidia_smi(query: str) -> list[str]:
    """What nvidia-smi knows of the GPU; nothing without it."""
    if not shutil.which("nvidia-smi"):
        return []
    words = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    asked = subprocess.run([*words, "-i", "0"], capture_output=True, text=True)
    return asked.stdout.strip().split(", ") if asked.returncode == 0 else []


def measured(words: list, seconds: float) -> dict:
    """Have a process of its own measure, and look at the GPU meanwhile."""
    began, samples = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "found.json"), Path(folder, "log")
        command = [sys.executable, "-m", "benchmarks.gpu", file, *words]
        with log.open("w") as out:
            process = subprocess.Popen(
                list(map(str, command)), stdout=out, stderr=out, start_new_session=True
            )
        while process.poll() is None and time.monotonic() - began < seconds:
            time.sleep(1)
            samples.append(nvidia_smi(QUERY))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        status = {0: "passed", 2: "skipped"}.get(process.wait(), "failed")
        over = time.monotonic() - began >= seconds
        lines = [line for line in log.read_text().splitlines() if line.strip()] or [""]
        line = next((line for line in lines if ": error: " in line), lines[-1])
        found = json.loads(file.read_text()) if status == "passed" else {}
    busy = [list(map(float, one)) for one in samples if one and float(one[-1]) > 50]
    columns = zip(QUERY.split(","), zip(*busy, strict=True), strict=False)
    found["gpu"] = {name: spread(list(column)) for name, column in columns}
    line = "; ".join(told(found)) if status == "passed" else line
    if over and status == "failed":
        status, line = "not run", f"{seconds:.0f} s were not enough"
    taken = time.monotonic() - began
    return {"status": status, "line": line, "seconds": taken, "found": found}


def told(found: dict) -> Iterator[str]:
    """What was found, in words."""
    for title, row in found.get("rows", {}).items():
        ratio = "{median:.3f} ({low:.3f} to {high:.3f})".format(**row["ratio"])
        yield f"{title} {row['value']['median']:.0f} images/s, ratio {ratio}"
    for batch, row in found.get("batches", {}).items():
        values = [
            f"{k} {v if isinstance(v, str) else f'{v:.4g}'}" for k, v in row.items()
        ]
        yield f"batch {batch}: {', '.join(values)}"
    for name, value in found["gpu"].items():
        yield f"{name} {value['median']:.0f}"


def everything(file: Path, tiny: bool) -> None:
    """Measure what is missing in FILE, and write it after each measurement."""
    old = json.loads(file.read_text())["rows"] if file.exists() else []
    here, until = commit(), float(os.environ.get("GPU_CHECK_UNTIL", "inf"))
    kept = {one["name"]: one for one in old if one["commit"] == here}
    report = {
        "device": "rehearsed on a CPU" if tiny else describe(torch.device("cuda")),
        "versions": {"torch": torch.__version__, "CUDA": torch.version.cuda},
        "driver, power limit": nvidia_smi("driver_version,power.limit"),
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
    """Do what the command line asks for."""
    file, *words = sys.argv[1:]
    if words in ([], ["--rehearse"]):
        everything(Path(file), bool(words))
    works = {"speed": compare_speed, "network": network_speed, "input": input_share}
    found = works[words[0]](*words[1:])
    Path(file).write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.flush()
    os._exit(0)  # libraries of a job that was left half-way need not clean up


if __name__ == "__main__":
    with exit_status():
        main()
