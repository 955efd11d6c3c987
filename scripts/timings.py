"""Time every strategy under equal rules, each through its own launcher.

    bash scripts/timings.sh [--data DIR] [--full]

One JSON file for each run goes to OUTPUT/runs, and scripts/report.py makes a table and
a figure of them at the end. Interrupted, the same command goes on with what is missing.

Equal for all strategies of a row: model, images per step, precision, loader processes,
compute threads in all, data, seed. Strategies take turns, in another order each time,
and everything is run more than once, so that what the machine does meanwhile meets all
alike.
"""

import argparse
import contextlib
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import report
from quickstart import LAUNCHERS, ROOT

from benchmarks.photographs import write_photographs
from common.arguments import OneLineParser, architecture, positive
from common.data import class_folders
from common.device import (
    PRECISIONS,
    best_precision,
    describe,
    machine_cores,
    usable_gpus,
)
from common.errors import UserError, say
from common.log import commit
from launch.check import PREFETCH
from launch.exits import exit_status

try:
    import pynvml  # nvidia-ml-py, of requirements-report.txt
except ImportError:
    pynvml = None

IMAGES = 64  # different ones among the JPEGs that this script makes itself
CLASSES = 1000  # as of random images, so that both modes train the same network
LIBRARY = re.compile("(Apex|Horovod|no amp|this Horovod)")  # what its absence is called
# Settings of the launch scripts with which a run would be another one
LAUNCH_SETTINGS = (
    *("LAUNCHER", "CONTROLLER", "HOSTS", "NNODES", "NODE_RANK", "NPROC"),
    *("RDZV_ENDPOINT", "RDZV_ID", "MAX_RESTARTS", "PREFLIGHT"),
)
SECONDS = 900  # after which a run, where --full is not given, counts as hung


class Cell(NamedTuple):
    """What all strategies do before the next thing is timed."""

    mode: str  # "device": random images that lie there already; "data": JPEG files
    devices: int  # GPUs, or processes on a CPU
    global_batch_size: int
    precision: str


class Run(NamedTuple):
    """One launch of one strategy."""

    cell: Cell
    strategy: str
    repeat: int

    @property
    def name(self) -> str:
        """Name of its JSON file, without the ending."""
        mode, devices, batch, precision = self.cell
        setting = f"{mode}-{devices}x{batch // devices}-{precision}"
        return f"{setting}-{self.strategy}-{self.repeat}"

    @property
    def kind(self) -> str:
        """What a library that is missing makes impossible."""
        return f"{self.strategy} {self.cell.precision}"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and fill in sizes that suit the machine."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--data", metavar="DIR", type=Path, help="folder with train/ and val/ (its own)"
    )
    add("--full", action="store_true", help="whole epochs of --data, and longer runs")
    add("--output", metavar="DIR", type=Path, default=Path("runs/timings"))
    add("--arch", metavar="NAME", type=architecture, help="resnet50; resnet18 on a CPU")
    add(
        "--image-size",
        metavar="N",
        type=positive,
        help="224; 64 on a CPU, 32 without bf16",
    )
    add(
        "--batch-size",
        metavar="N",
        type=positive,
        help="images per device and step (64; 32 on a CPU, 16 without bf16); strong "
        "scaling shares out four times as many (on a CPU twice)",
    )
    add(
        "--precision",
        choices=PRECISIONS,
        nargs="+",
        help="one or more (fp16, which all five have; on a CPU bf16 where it has it)",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args(argv)
    if args.full and not args.data:
        parser.error("--full needs --data DIR")
    gpus = usable_gpus() if args.device != "cpu" else 0
    if args.device == "cuda" and not gpus:
        parser.error("--device cuda: this machine shows no CUDA GPU")
    args.device_flag, args.device = args.device, "cuda" if gpus else "cpu"
    cores = machine_cores()
    most = gpus or min(2, cores)
    args.devices = [2**power for power in range(most.bit_length())]
    if args.devices[-1] != most:
        args.devices.append(most)
    largest = args.devices[-1]
    args.workers = min(machine_cores(), 16 * largest)
    args.threads = max(1, machine_cores() // largest)  # of each process
    best = best_precision(torch.device("cpu"))
    fast = best == "bf16"
    args.arch = args.arch or ("resnet50" if gpus else "resnet18")
    args.image_size = args.image_size or (224 if gpus else 64 if fast else 32)
    args.batch_size = args.batch_size or (64 if gpus else 32 if fast else 16)
    args.precision = args.precision or ["fp16" if gpus else best]
    args.lap = 10 if gpus else 2  # steps between two looks at the clock
    args.steps = (200 if args.full else 100) if gpus else 12  # after a lap of warm-up
    # Of dataparallel, whose loaders stay furthest ahead, the warm-up is a quarter
    args.data_steps = max(args.lap + args.steps, 4 * PREFETCH * args.workers)
    args.loader_steps = max(60, 6 * args.workers)
    args.repeats = 3 if args.full else 2
    return args


def plan(args: argparse.Namespace) -> list[Run]:
    """All runs, in the order in which they are made."""
    largest = args.devices[-1]
    together = args.batch_size * (4 if args.device == "cuda" else 2)
    cells = []
    for precision in args.precision:
        weak = [("device", n, n * args.batch_size) for n in args.devices]
        strong = [("device", n, together) for n in args.devices if not together % n]
        counts = {1, largest} if args.device == "cuda" or args.full else {largest}
        data = [("data", n, n * args.batch_size) for n in sorted(counts)]
        sizes = dict.fromkeys([*weak, *strong, *data])
        cells += [Cell(*size, precision) for size in sizes]
    order = random.Random(0)
    return [
        Run(cell, strategy, repeat)
        for repeat in range(1, args.repeats + 1)
        for cell in cells
        for strategy in order.sample(list(LAUNCHERS), len(LAUNCHERS))
        # On a CPU it is one process with all the threads, whatever it is given
        if args.device == "cuda"
        or strategy != "dataparallel"
        or cell.devices == largest
    ]


def own_data(args: argparse.Namespace) -> Path:
    """Make JPEG files enough for the steps of the largest batch.

    They are few different ones under many names: a loader reads and decodes each anew.
    Those for validation, which is not timed, are small.
    """
    steps = max(args.data_steps, args.loader_steps)
    needed = max(CLASSES, args.batch_size * args.devices[-1] * steps)
    folder = ROOT / "sample_data" / f"photographs-{needed}"
    if folder.exists():
        return folder
    print(f"making JPEG files in {folder}", flush=True)
    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    write_photographs(temporary / "different", train=IMAGES, val=0)
    files = sorted(temporary.glob("different/train/*/*"))
    small = temporary / "different" / "small.JPEG"
    Image.new("RGB", (32, 32)).save(small)
    for number in range(CLASSES):
        for part in ("train", "val"):
            (temporary / part / f"{number:03d}").mkdir(parents=True)
        os.link(small, temporary / "val" / f"{number:03d}" / small.name)
    for number in range(needed):
        name = Path("train", f"{number % CLASSES:03d}", f"{number}.JPEG")
        os.link(files[number % IMAGES], temporary / name)
    shutil.rmtree(temporary / "different")
    temporary.rename(folder)
    return folder


def short_validation(data: Path, folder: Path) -> Path:
    """The training images of `data` and one validation image of each class, as links.

    Raises:
        UserError: there is no such folder, or nothing in it.
    """
    (folder / "train").symlink_to((data / "train").resolve())
    class_folders(data / "train")
    for name in class_folders(data / "val"):
        files = (data / "val" / name).iterdir()
        images = (file for file in files if file.suffix.lower() in IMG_EXTENSIONS)
        first = min(images, default=None)
        (folder / "val" / name).mkdir(parents=True)
        if first is not None:
            (folder / "val" / name / first.name).symlink_to(first.resolve())
    return folder


def command(args: argparse.Namespace, run: Run, output: Path) -> tuple[list, dict]:
    """The command line of a run, and what it adds to the environment."""
    mode, devices, batch, precision = run.cell
    steps = args.lap + args.steps if mode == "device" else args.data_steps
    flags = ["--data", args.data]
    if mode == "device":
        flags = ["--synthetic", batch * steps]
    flags += ["--arch", args.arch, "--image-size", args.image_size]
    flags += ["--global-batch-size", batch, "--precision", precision]
    flags += ["--workers", args.workers, "--device", args.device_flag, "--epochs", 1]
    if mode == "device" or not args.full:
        flags += ["--max-steps", steps]
    flags += ["--print-interval", args.lap, "--timeout-seconds", 120]
    flags += ["--checkpoint-steps", 10**6]  # none before the end of the epoch
    flags += ["--output", output]
    alone = run.strategy == "dataparallel"
    added = {"OMP_NUM_THREADS": str(args.threads * (devices if alone else 1))}
    if not alone:
        added["NPROC"] = str(devices)
    if args.device == "cuda":
        added["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_names(devices))
    script = ROOT / "scripts" / f"{run.strategy}.sh"
    return ["bash", str(script), *map(str, flags)], added


def gpu_names(number: int) -> list[str]:
    """The first `number` of the GPUs that the user lets this command see."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return (gpus if gpus[0] else [str(one) for one in range(number)])[:number]


class GpuSamples(threading.Thread):
    """Asks NVML how busy the GPUs are, until a checkpoint is saved.

    That happens after the last step and a validation, which is short.

    Source: https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html
    """

    def __init__(self, output: Path, gpus: list[str]):
        super().__init__(daemon=True)
        self.output = output
        self.gpus = gpus
        self.samples: list[tuple[float, float]] = []  # when, and percent
        self.ended = threading.Event()

    def run(self) -> None:
        """Take a sample every quarter of a second; none where there is no NVML."""
        if not self.gpus or pynvml is None:
            return
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            handles = [
                pynvml.nvmlDeviceGetHandleByIndex(int(gpu))
                if gpu.isdigit()
                else pynvml.nvmlDeviceGetHandleByUUID(gpu)
                for gpu in self.gpus
            ]
            while not self.ended.wait(0.25) and not any(self.output.glob("*.pt*")):
                for handle in handles:
                    busy = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
                    self.samples.append((time.monotonic(), float(busy)))

    def mean(self, seconds: float) -> float | None:
        """Mean over GPUs and the last `seconds`, in percent; None without samples."""
        self.ended.set()
        self.join(10)  # a GPU that is lost may not answer
        last = max((when for when, _ in self.samples), default=0)
        timed = [percent for when, percent in self.samples if when > last - seconds]
        return sum(timed) / len(timed) if timed else None


def nvidia_smi(*options: str) -> str:
    """What nvidia-smi prints; "" without it, or where it does not answer."""
    words = ["nvidia-smi", *options]
    try:
        asked = subprocess.run(words, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout if asked.returncode == 0 else ""


def machine(device: str) -> dict:
    """Hardware and versions."""

    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    facts = {
        "cpu": describe(torch.device("cpu")),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": version("torchvision"),
        "horovod": version("horovod"),
        "apex": version("apex"),
        "cuda": torch.version.cuda if device == "cuda" else None,
    }
    if device == "cuda":
        query = "--query-gpu=name,driver_version,power.limit,memory.total"
        query = (query, "--format=csv,noheader,nounits")
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        used = ("-i", ",".join(gpu_names(usable_gpus())))
        facts["gpus"] = nvidia_smi(*query, *used).splitlines()
        facts["gpu_links"] = nvidia_smi("topo", "-m")
    return facts


class Failed(Exception):
    """A run that ended with an error; `unavailable` where none of its kind can run."""

    def __init__(self, reason: str, unavailable: bool):
        super().__init__(reason)
        self.unavailable = unavailable


def ended(words: list[str], added: dict, log: Path, seconds: float | None) -> int:
    """Run a command, and wait for its exit status.

    Raises:
        Failed: it took longer than `seconds`.
    """
    environment = {n: v for n, v in os.environ.items() if n not in LAUNCH_SETTINGS}
    with log.open("w") as file:
        process = subprocess.Popen(
            words, stdout=file, stderr=file, env={**environment, **added}
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            stop(process)
            reason = f"not over after {seconds} s, see {log}"
            raise Failed(reason, unavailable=False) from None
        except KeyboardInterrupt:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            stop(process)  # where only this process was asked to stop
            raise


def stop(process: subprocess.Popen) -> None:
    """Ask a launch script to end, and make it after a minute."""
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def launch(args: argparse.Namespace, run: Run, log: Path) -> dict:
    """Make one run; returns what is worth keeping.

    Raises:
        Failed: it did not end well.
    """
    problem = os.environ.get("HOROVOD_PROBLEM")
    if run.strategy == "horovod_distributed" and problem:
        raise Failed(problem, unavailable=True)
    with tempfile.TemporaryDirectory(prefix="timings-") as folder:
        output = Path(folder, "run")
        words, added = command(args, run, output)
        gpus = added.get("CUDA_VISIBLE_DEVICES", "").split(",")
        samples = GpuSamples(output, gpus if gpus[0] else [])
        samples.start()
        began = time.monotonic()
        try:
            status = ended(words, added, log, None if args.full else SECONDS)
        finally:
            samples.ended.set()
        if status:
            errors = re.findall(r": error: (.*)", log.read_text())
            reason = errors[0] if errors else f"exit status {status}, see {log}"
            missing = LIBRARY.match(reason) and status == 2
            raise Failed(reason, unavailable=bool(missing))
        found = json.loads((output / "epochs.jsonl").read_text())
        warm = found["warmup_steps"]
        timed = found["steps"] - warm
        if not timed:
            reason = f"all {warm} steps were warm-up: more images or a smaller batch"
            raise Failed(reason, unavailable=False)
        first = float(re.search(r", step \d+/\d+: loss (\S+),", log.read_text())[1])
        seconds = timed * run.cell.global_batch_size / found["images_per_second"]
        return {
            **run.cell._asdict(),
            "strategy": run.strategy,
            "launcher": LAUNCHERS[run.strategy],
            "repeat": run.repeat,
            "environment": added,
            "image_size": args.image_size,
            "steps_between_looks": args.lap,
            "warmup_steps": warm,
            "timed_steps": timed,
            **{name: found[name] for name in report.MEASURED},
            "gpu_utilisation": samples.mean(seconds),
            "wall_seconds": time.monotonic() - began,
            "first_loss": first,
            "later_loss": (found["train_loss"] * found["steps"] - first * args.lap)
            / (found["steps"] - args.lap),
            "run": json.loads((output / "report.json").read_text()),
            "machine": machine(args.device),
        }


def loader_alone(args: argparse.Namespace) -> dict:
    """Time the loader processes with nothing to compute beside them."""
    words = [sys.executable, "-m", "scripts.loader_alone"]
    batch = args.batch_size * args.devices[-1]
    flags = ["--data", args.data, "--image-size", args.image_size, "-b", batch]
    flags += ["--workers", args.workers, "--device", args.device_flag]
    flags += ["--max-steps", args.loader_steps]
    words += map(str, flags)
    limit = None if args.full else SECONDS
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=limit,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"not over after {limit} s", unavailable=False) from None
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        reason = last.rpartition(": error: ")[2] or f"exit status {done.returncode}"
        raise Failed(reason, unavailable=False)
    return {**json.loads(done.stdout), "machine": machine(args.device)}


def settings(args: argparse.Namespace) -> dict:
    """What has to be equal where an interrupted command goes on."""
    names = ("arch", "image_size", "batch_size", "precision", "device", "devices")
    names += ("workers", "threads", "lap", "steps", "data_steps", "repeats", "full")
    chosen = {name: getattr(args, name) for name in names}
    data = args.data
    data = data.relative_to(ROOT) if data.is_relative_to(ROOT) else data
    facts = machine(args.device)
    names = ("cpu", "gpus", "torch", "horovod", "apex", "cuda", "nccl")
    chosen |= {name: facts.get(name) for name in names}
    return {**chosen, "data": str(data), "commit": commit()}


def keep(path: Path, content: dict) -> None:
    """Write a JSON file so that it is there whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.rename(path)


def open_output(args: argparse.Namespace) -> None:
    """Make the folder, or see that it holds a part of the same timings.

    Raises:
        UserError: it holds others.
    """
    file, now = args.output / "settings.json", settings(args)
    if file.exists():
        before = json.loads(file.read_text())
        for name, value in now.items():
            if before.get(name) != value:
                raise UserError(
                    f"{args.output} holds timings with {name} {before.get(name)}, now "
                    f"it is {value}: choose another --output, or delete it"
                )
    elif any(args.output.glob("runs/*.json")):
        raise UserError(f"{args.output} holds runs and no settings.json: delete it")
    (args.output / "runs").mkdir(parents=True, exist_ok=True)
    keep(file, now)


def measure(args: argparse.Namespace) -> list[str]:
    """Make all runs that are not there yet, one line for each.

    Returns:
        the runs that failed, which this machine could have made.
    """
    file = args.output / "problems.json"
    # By run, or by strategy and precision; of an earlier command until tried again
    problems = json.loads(file.read_text()) if file.exists() else {}
    tried = set()
    try:
        measure_loader(args, problems)
        runs = plan(args)
        for number, run in enumerate(runs, start=1):
            if run.kind not in tried:
                problems.pop(run.kind, None)
                tried.add(run.kind)
            if run.kind in problems:
                continue
            problems.pop(run.name, None)
            mode, devices, batch, precision = run.cell
            setting = f"{mode:6} {devices} x {batch // devices} {precision}"
            title = f"[{number}/{len(runs)}] {setting} {run.strategy:27}"
            print(f"{title} {measure_one(args, run, problems)}", flush=True)
    finally:
        keep(file, problems)
    return [name for name in problems if name not in {run.kind for run in runs}]


def measure_loader(args: argparse.Namespace, problems: dict[str, str]) -> None:
    """Time the loader alone, if that is not there yet."""
    file = args.output / "loader.json"
    problems.pop("loader alone", None)
    try:
        if not file.exists():
            keep(file, loader_alone(args))
        speed = json.loads(file.read_text())["images_per_second"]
        print(f"loader alone: {speed:.0f} images/s", flush=True)
    except Failed as failed:
        problems["loader alone"] = str(failed)
        print(f"loader alone: {failed}", flush=True)


def measure_one(args: argparse.Namespace, run: Run, problems: dict[str, str]) -> str:
    """Make one run, if it is not there yet; what came of it in words."""
    file = args.output / "runs" / f"{run.name}.json"
    if not file.exists():
        log = args.output / f"{run.name}.log"
        try:
            keep(file, launch(args, run, log))
            log.unlink(missing_ok=True)
        except Failed as failed:
            problems[run.kind if failed.unavailable else run.name] = str(failed)
            if failed.unavailable:
                log.unlink(missing_ok=True)
            return str(failed)
    found = json.loads(file.read_text())
    return (
        f"{found['images_per_second']:7.0f} images/s, a step takes "
        f"{found['step_milliseconds']:.0f} ms"
    )


def main() -> None:
    """Measure and report.

    Raises:
        UserError: of bad flags or folders, a full disk ...
    """
    try:
        time_all()
    except OSError as error:
        where = error.filename or "writing"
        raise UserError(f"{where}: {error.strerror or error}") from None


def time_all() -> None:
    """Make all runs, and print the report of them."""
    args = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.setdefault("PYTHON", sys.executable)
    devices = " ".join(map(str, args.devices))
    timed = "the rest of an epoch" if args.full else args.steps
    print(
        f"{args.arch} at {args.image_size} px, {args.batch_size} images per device, "
        f"{', '.join(args.precision)}; {devices} "
        f"{'GPUs' if args.device == 'cuda' else 'CPU processes'} with {args.threads} "
        f"compute threads each, {args.workers} loader processes in all; {args.lap} "
        f"steps of warm-up, then {timed} timed; {len(plan(args))} runs",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="timings-") as folder:
        args.data = args.data or own_data(args)
        used = short_validation(args.data, Path(folder))
        open_output(args)
        args.data = args.data if args.full else used
        try:
            failed = measure(args)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            text = "\ninterrupted; the same command goes on from here"
            if any(args.output.glob("runs/*.json")):
                report.write(args.output)
                text += f"; what there is: {args.output}/report.md"
            print(text, file=sys.stderr)
            sys.exit(130)
    report.write(args.output)
    text = (args.output / "report.md").read_text()
    print(f"\n{text}\nIt is in {args.output}; delete that to measure again.")
    if failed:
        say(f"failed: {', '.join(failed)}; the same command tries again")
        sys.exit(1)


if __name__ == "__main__":
    with exit_status():
        main()
