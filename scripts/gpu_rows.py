"""What scripts/gpu_check.py tries, row by row, and what has to come out of each."""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from itertools import combinations, count
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from quickstart import ROOT
from timings import nvidia_smi

from benchmarks.gpu import BARE, USUAL, USUAL_SAME
from benchmarks.step import STEPS as TIMED_STEPS
from common.device import gpu_problem, usable_gpus

MARK = "GPU_CHECK_ROW"  # in the environment of all processes of a row
GOALS = {BARE: 0.97, USUAL: 1.5}  # a script's speed over that of these loops

# Largest difference of a loss between two runs that should be one (strategies, GPU and
# CPU), in the mean over the first epoch's STEPS steps. Rounding grows at each step of
# this network and batch, the faster the larger the learning rate: on a CPU two memory
# formats in fp32 were 0.015 apart at 0.1, 0.002 at 0.01 and 3e-5 at 0.001, which is
# taken. There bf16 was 0.002 from fp32 (fp16 has 3 bits more), twice the learning rate
# 0.02, and images that were normalised twice 0.002.
LOSS_TOLERANCE = {"fp32": 3e-4, "bf16": 0.02, "fp16": 3e-3}
# Of momenta and batch norm's statistics after a resume, relative to their norm, at
# learning rate 0, where nothing grows. Momenta that start anew are 0.9 ** 8 = 0.43 off.
STATE_TOLERANCE = {"fp32": 0.01, "bf16": 0.2, "fp16": 0.1}
# Of a pixel on its way to the network: float32 rounds two operations on values below
# 2.7 (a few times 1.2e-7); fp16, in which O2 hands them on, has steps of 2**-9 there.
INPUT_TOLERANCE = {"fp32": 1e-6, "O1": 1e-6, "O2": 2**-10 + 1e-6}

EPOCHS, STEPS, BATCH, IMAGES = 4, 4, 16, 64
RECIPE = f"-b {BATCH} --epochs {EPOCHS} --max-steps {STEPS} --lr 0.001"
RECIPE += f" --warmup-epochs 0 --print-interval {STEPS} --workers 2 --arch resnet18"
DATA = ROOT / "sample_data" / "gpu_check"
HOROVOD = ROOT / "runs" / "gpu_check" / "horovod"  # where it is built
STRATEGIES = ("distributed", "multiprocessing_distributed", "dataparallel")


class Failed(Exception):
    """What a row did wrong, in one line."""


class Row(NamedTuple):
    """One thing to try."""

    group: str  # the JSON file it goes to
    name: str
    limit: int  # seconds
    work: Callable[["Launcher"], dict]  # what it found; "line" says it in words
    missing: Callable[[], str | None] = lambda: None  # why it cannot be had here
    alone: bool = False  # it is timed, or needs what came before


class Launcher:
    """Starts the processes of one row, and ends them all at its limit."""

    numbers = count()

    def __init__(self, limit: float):
        self.mark = f"{os.getpid()}-{next(self.numbers)}"
        self.over = False
        self.folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))
        self.commands: list[list[str]] = []
        self.timer = threading.Timer(limit, self.end)
        self.timer.start()

    def __call__(self, *words: object, **variables: str) -> str:
        """Run a command to its end; returns what it printed.

        Raises:
            Failed: it ended with an error, or the limit is reached.
        """
        if self.over:
            raise Failed("not begun")
        command = [str(word) for word in words]
        self.commands.append(command)
        log = self.folder / f"{len(self.commands)}.log"
        paths = [str(HOROVOD), *filter(None, [os.environ.get("PYTHONPATH")])]
        path = f"{HOROVOD / 'bin'}:{os.environ['PATH']}"
        added = {"PYTHONPATH": ":".join(paths), "PATH": path, **variables}
        with log.open("w") as file:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHON": sys.executable, MARK: self.mark, **added},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            if self.over:  # since it was asked above
                end_processes(self.mark)
            status = process.wait()
        text = log.read_text(errors="replace")
        if self.over or status:
            raise Failed(what_went_wrong(text, status))
        return text

    def logs(self) -> list[str]:
        """The last lines of what was printed."""
        files = sorted(self.folder.glob("*.log"))
        text = "".join(file.read_text(errors="replace") for file in files)
        return text[-4000:].splitlines()

    def end(self) -> None:
        """Kill what is still running: the limit is reached."""
        self.over = True
        end_processes(self.mark)

    def close(self) -> None:
        """Leave nothing behind."""
        self.timer.cancel()
        end_processes(self.mark)
        shutil.rmtree(self.folder, ignore_errors=True)


def end_processes(mark: str) -> None:
    """Kill all processes that inherited a mark, launchers' new sessions included."""
    wanted = f"{MARK}={mark}".encode()
    found = True
    while found:
        found = False
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted not in (folder / "environ").read_bytes().split(b"\0"):
                    continue
                os.kill(int(folder.name), signal.SIGKILL)
                found = True
        time.sleep(0.05 * found)


def what_went_wrong(text: str, status: int) -> str:
    """The line of an output that says so, without what a launcher adds."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [line for line in lines if ": error: " in line]
    raised = re.compile(r"(\[\w+\]: ?)?(?!.*ChildFailedError)[\w.]+(Error|Exception)\b")
    errors = [line for line in lines if raised.match(line)]
    last = (ours or errors or lines[-1:] or ["no output"])[0]
    return f"exit status {status}: {last.rpartition(': error: ')[2]}"


# --- the training rows ---


class Setting(NamedTuple):
    """How a strategy trains."""

    strategy: str
    processes: int
    precision: str  # or an opt level of Apex
    compile: bool = False
    device: str = "cuda"
    image_size: int = 64

    @property
    def name(self) -> str:
        """What it is called in the table."""
        count = f"{self.processes} process{'es' * (self.processes > 1)}"
        strategy = self.strategy + " compiled" * self.compile
        return f"{strategy}, {count}, {self.precision}"

    @property
    def computes(self) -> str:
        """The precision it computes in."""
        return {"O0": "fp32", "O1": "fp16", "O2": "fp16"}.get(
            self.precision, self.precision
        )


def precision_flags(precision: str) -> list[str]:
    """The flag that asks for a precision or opt level."""
    return ["--opt-level" if precision[0] == "O" else "--precision", precision]


def first_gpus(number: int) -> dict[str, str]:
    """The variable that leaves so many of the visible GPUs visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    every = visible if visible[0] else [str(n) for n in range(usable_gpus())]
    return {"CUDA_VISIBLE_DEVICES": ",".join(every[:number])} if every else {}


def train(launch: Launcher, setting: Setting, name: str, *flags: object) -> dict:
    """Train through the launch script; returns the curve and what the run says of it.

    Raises:
        Failed: it did not, or not as it was asked to.
    """
    output = launch.folder / name
    words = ["--data", DATA, *RECIPE.split(), *precision_flags(setting.precision)]
    words += ["--image-size", setting.image_size, "--device", setting.device]
    words += ["--output", output, *flags]
    words += ["--compile"] * setting.compile
    shared = setting.device == "cuda" and setting.processes > usable_gpus()
    words += ["--backend", "gloo"] * shared
    # Convolutions would round fp32 to TF32's 11 bits; curves are compared in fp32
    variables = {"NVIDIA_TF32_OVERRIDE": "0", "OMP_NUM_THREADS": "2"}
    variables["GLOO_SOCKET_IFNAME"] = "lo"  # names of machines need not resolve
    if setting.strategy != "dataparallel":
        variables["NPROC"] = str(setting.processes)
    if setting.device == "cuda":
        variables |= first_gpus(setting.processes)
    script = ROOT / "scripts" / f"{setting.strategy}.sh"
    launch("bash", script, *words, **variables)
    report = json.loads((output / "report.json").read_text())
    world_size = 1 if setting.strategy == "dataparallel" else setting.processes
    asked = [setting.device, world_size, setting.precision]
    ran = [report["device"], report["world_size"], report["precision"]]
    if ran != asked:
        raise Failed(f"asked for {asked}, ran {ran}")
    records = [json.loads(line) for line in (output / "epochs.jsonl").open()]
    content = read_checkpoint(output)
    last = records[-1]
    return {
        "setting": setting._asdict(),
        "curve": [[one["train_loss"], one["val_loss"]] for one in records],
        "scale": content.get("amp", {}).get("loss_scaler0") or content["scaler"],
        "peak_memory_mib": last["peak_memory_mib"],
        "compared": (setting.strategy, setting.processes) != ("dataparallel", 2),
        "line": f"loss {records[0]['train_loss']:.3f} to {last['train_loss']:.3f}, "
        f"{last['peak_memory_mib']:.0f} MiB",
    }


def one_training(launch: Launcher, setting: Setting) -> dict:
    """A training row."""
    found = train(launch, setting, "run")
    if len(found["curve"]) != EPOCHS:
        raise Failed(f"{len(found['curve'])} epochs in place of {EPOCHS}")
    return found


def largest_difference(one: dict, other: dict, epochs: int) -> float:
    """Between the training losses of two runs; infinite where one is no number."""
    pairs = list(zip(one["curve"], other["curve"], strict=True))[:epochs]
    differences = [abs(a[0] - b[0]) for a, b in pairs]
    return max(math.inf if math.isnan(value) else value for value in differences)


def loss_scale(run: dict) -> float:
    """The loss scale at the end, 1 without; each halving has skipped a step."""
    return run["scale"].get("scale", run["scale"].get("loss_scale", 1.0))


def one_resume(launch: Launcher, setting: Setting) -> dict:
    """Train in one piece and in two, and compare.

    At learning rate 0 the weights stay, so that rounding does not grow; gradients go
    into the momenta, and images into the losses and batch norm's statistics.
    """
    whole = train(launch, setting, "whole", "--lr", 0)
    train(launch, setting, "parts", "--lr", 0, "--epochs", EPOCHS // 2)
    parts = train(launch, setting, "parts", "--lr", 0, "--resume", "auto")
    ends = [read_checkpoint(launch.folder / name) for name in ("whole", "parts")]
    return judge_resume(whole, parts, state_differences(*ends), setting.computes)


def read_checkpoint(output: Path) -> dict:
    """What a run saved last."""
    path = output / "checkpoint.pt"
    return torch.load(path, map_location="cpu", weights_only=True)


def state_differences(whole: dict, parts: dict) -> dict[str, float]:
    """How far two checkpoints are apart.

    Weights and O2's fp32 weights: the largest difference. Momenta and statistics: the
    norm of the difference over that of the one in one piece.
    """

    def tensors(content: dict) -> dict[str, list]:
        model = content["state_dict"]
        state = content["optimizer"]["state"].values()
        kept = [tensor for name, tensor in model.items() if "running_" in name]
        return {
            "weights": [model[name] for name in model if "running_" not in name],
            "masters": content.get("masters", {}).get("tensors", []),
            "momenta": [one["momentum_buffer"] for one in state],
            "statistics": kept,
        }

    one, other = tensors(whole), tensors(parts)
    found = {}
    for name, left in one.items():
        pairs = zip(left, other[name], strict=True)
        pairs = [(a.double().flatten(), b.double().flatten()) for a, b in pairs]
        if not pairs:
            continue
        if name in ("weights", "masters"):
            found[name] = max((a - b).abs().max().item() for a, b in pairs)
        else:
            a, b = (torch.cat(side) for side in zip(*pairs, strict=True))
            found[name] = ((a - b).norm() / a.norm()).item()
    return found


def judge_resume(
    whole: dict, parts: dict, states: dict[str, float], precision: str
) -> dict:
    """Compare a run in one piece with one that was stopped and resumed.

    Raises:
        Failed: they differ.
    """
    difference = largest_difference(whole, parts, EPOCHS)
    allowed = LOSS_TOLERANCE[precision]
    if not difference <= allowed:
        raise Failed(f"losses differ by {difference:.2g}, allowed {allowed}")
    for name, value in states.items():
        most = 0 if name in ("weights", "masters") else STATE_TOLERANCE[precision]
        if not value <= most:
            raise Failed(f"{name} differ by {value:.2g}, allowed {most}")
    if whole["scale"] != parts["scale"]:
        raise Failed(f"loss scale {parts['scale']}, in one piece {whole['scale']}")
    line = f"losses differ by {difference:.2g}, allowed {allowed}; "
    line += ", ".join(f"{name} by {value:.2g}" for name, value in states.items())
    if whole["scale"]:
        line += f"; loss scaling goes on from {loss_scale(whole):.0f}"
    curves = {"whole": whole["curve"], "parts": parts["curve"]}
    return {"difference": difference, "states": states, **curves, "line": line}


def judge_agreement(runs: dict[str, dict], reference: dict, tolerance: float) -> dict:
    """Compare curves with each other and with the CPU's.

    A run whose loss scale was halved has skipped a step for it, on purpose, and is
    compared with its like only.

    Raises:
        Failed: two of them differ.
    """
    every = {"the CPU in fp32": {**reference, "scale": {}}, **runs}
    steps = {name: min(1.0, loss_scale(one) / 2**16) for name, one in every.items()}
    steps |= {name: 1.0 for name, one in every.items() if loss_scale(one) == 1}
    pairs = {
        f"{one} / {other}": largest_difference(every[one], every[other], 1)
        for one, other in combinations(every, 2)
        if steps[one] == steps[other]
    }
    others = [name for name, share in steps.items() if share < 1]
    line = f"mean loss of the first {STEPS} steps of {len(runs)} runs and the CPU's"
    line += f" ({', '.join(others)} skipped steps: not with the CPU's)" * bool(others)
    if not pairs:
        return {"pairs": pairs, "line": f"nothing to compare: {line}"}
    pair, difference = max(pairs.items(), key=lambda item: item[1])
    if not difference <= tolerance:
        raise Failed(f"losses differ by {difference:.2g}, allowed {tolerance}: {pair}")
    found = {"difference": difference, "tolerance": tolerance, "pairs": pairs}
    line += f", at most {difference:.2g} apart, allowed {tolerance}"
    return {**found, "line": line}


# --- the rows that are measured ---


def measure(launch: Launcher, what: str, which: str, *others: object, **env) -> dict:
    """Have benchmarks/gpu.py do something; returns what it found."""
    file = launch.folder / "found.json"
    words = ["-m", "benchmarks.gpu", what, which, file, *others]
    launch(sys.executable, *words, **env)
    return json.loads(file.read_text())


def one_input(launch: Launcher, setting: Setting) -> dict:
    """What reaches the network against the usual floats of the CPU."""
    flags = ["--data", DATA, *RECIPE.split(), "--epochs", 1]
    flags += ["--image-size", setting.image_size, "--device", setting.device]
    flags += [*precision_flags(setting.precision), "--output", launch.folder / "run"]
    found = measure(launch, "input", setting.strategy, *flags, **first_gpus(1))
    return judge_input(found, INPUT_TOLERANCE[setting.precision])


def judge_input(found: dict, tolerance: float) -> dict:
    """Compare what reached the network with what should have.

    Raises:
        Failed: it is something else.
    """
    difference = found["largest_difference"]
    line = f"{found['batches']} batches, pixels differ by {difference:.2g}"
    if not difference <= tolerance:
        raise Failed(f"{line}, allowed {tolerance}")
    return {**found, "tolerance": tolerance, "line": f"{line}, allowed {tolerance}"}


def one_speed(launch: Launcher, strategy: str, flags: Iterable, rounds: int) -> dict:
    """A script against a bare loop, and against the usual one."""
    output = launch.folder / "run"
    found = measure(
        launch, "speed", strategy, rounds, *flags, "--output", output, **first_gpus(1)
    )
    rows, kernels = found["rows"], found["apex_kernels"]
    ours = rows[f"{strategy}.py"]
    line = f"{ours['value']['median']:.0f} images/s, "
    share = ours["ratio"]["median"]
    line += f"{share:.3f} of the bare loop's{met(share, GOALS[BARE])}"
    if USUAL in rows:
        times = ours["value"]["median"] / rows[USUAL]["value"]["median"]
        line += (
            f"; {times:.2f} times the usual script in fp32 (TF32 in convolutions)"
            f"{met(times, GOALS[USUAL])}"
        )
    if USUAL_SAME in rows:
        times = ours["value"]["median"] / rows[USUAL_SAME]["value"]["median"]
        line += f", {times:.2f} times in the same precision"
    if kernels is not None:
        line += f"; Apex with{'out' * (not kernels)} its CUDA kernels"
    return {**found, "line": line}


def met(value: float, goal: float) -> str:
    """Say whether a goal is met."""
    return f" (goal {goal}: {'met' if value >= goal else 'missed'})"


def one_network(
    launch: Launcher, variant: str, device: str, size: int, batches: Iterable
) -> dict:
    """A ResNet-50 alone."""
    found = measure(launch, "model", variant, device, size, *batches, **first_gpus(1))
    lines = []
    for batch, one in found["batches"].items():
        if "problem" in one:
            lines.append(f"{batch}: {one['problem']}")
            continue
        text = f"{batch}: {one['images_per_second']:.0f} images/s, "
        text += f"{one['share_of_matrix_rate']:.0%}, {one['peak_memory_mib']:.0f} MiB"
        if one["time"]:
            shares = [f"{kind} {share:.0%}" for kind, share in one["time"].items()]
            text += f" ({', '.join(shares)})"
        lines.append(text)
    line = f"of {found['matrix_tflops']:.3g} TFLOP/s; batch " + "; ".join(lines)
    return {**found, "line": line}


def one_timing(launch: Launcher, strategy: str, mode: str, flags: Iterable) -> dict:
    """A strategy as scripts/timings.py times it."""
    found = measure(launch, "timing", strategy, mode, *flags, **first_gpus(1))
    line = f"{found['images_per_second']:.0f} images/s, a step takes "
    line += f"{found['step_milliseconds']:.1f} ms, "
    line += f"waited for data {found['data_wait_share']:.0%}, "
    if found["gpu_utilisation"] is not None:
        line += f"GPU in use {found['gpu_utilisation']:.0f} % of the time, "
    return {**found, "line": f"{line}{found['peak_memory_mib']:.0f} MiB"}


# --- what there is to try ---


class Machine:
    """What this machine has; found out when it is asked for."""

    def __init__(self, rehearse: bool):
        self.rehearse = rehearse
        self.device = "cpu" if rehearse else "cuda"
        self.gpus = usable_gpus()
        self.lock = threading.Lock()
        self.found: dict[str, str | None] = {}

    def gpu(self) -> str | None:
        """Why there is no GPU."""
        if self.gpus or self.rehearse:
            return None
        return gpu_problem() or "this machine has no CUDA GPU"

    def library(self, strategy: str) -> str | None:
        """Why a strategy's library cannot be had: what its script says."""
        with self.lock:
            if strategy not in self.found:
                self.found[strategy] = self.gpu() or self.probe(strategy)
            return self.found[strategy]

    def probe(self, strategy: str) -> str | None:
        """Have the check that goes before every launch look at the script."""
        if strategy not in ("apex_distributed", "horovod_distributed"):
            return None
        words = [sys.executable, "-m", "common.check", f"{strategy}.py", 1, "--"]
        words += ["--synthetic", 16, "-b", 16, "--device", self.device]
        launch = Launcher(90)
        try:
            launch(*words, "--output", launch.folder / "none")
        except Failed as failed:
            status, _, line = str(failed).partition(": ")
            return line if status == "exit status 2" else None  # else rows will fail
        finally:
            launch.close()
        return None

    def two(self, strategy: str) -> str | None:
        """Why a strategy cannot have two processes."""
        if strategy == "horovod_distributed" and self.gpus < 2 and not self.rehearse:
            return (
                "one GPU: NCCL takes no two processes on one, and Horovod's script has "
                "no --backend gloo"
            )
        if strategy == "dataparallel" and self.gpus < 2:
            return "one process, and no second GPU for a replica"
        return None


def archive() -> Path | None:
    """Horovod's source archive, beside the checkout or in it."""
    found = [*ROOT.parent.glob("horovod-*.tar.gz"), *ROOT.glob("horovod-*.tar.gz")]
    return min(found, default=None)


def build_horovod(launch: Launcher) -> dict:
    """Build it into a folder of its own."""
    source = archive()
    version = source.name.removesuffix(".tar.gz").partition("-")[2]
    variables = {"HOROVOD_SOURCE": str(source), "HOROVOD_TARGET": str(HOROVOD)}
    variables["HOROVOD_VERSION"] = version
    query = ("--query-gpu=compute_cap", "--format=csv,noheader")
    capabilities = {text.replace(".", "") for text in nvidia_smi(*query).split()}
    variables["HOROVOD_CAPABILITIES"] = ",".join(sorted(capabilities))
    text = launch("bash", ROOT / "scripts" / "install_horovod.sh", **variables)
    return {"line": text.strip().splitlines()[-1]}


def horovod_version() -> str | None:
    """Of the Horovod that rows use: built here, or of the environment."""
    found = metadata.distributions(name="horovod", path=[str(HOROVOD), *sys.path])
    return next((one.version for one in found), None)


def horovod_build_missing(here: Machine) -> str | None:
    """Why Horovod is not built."""
    if here.gpu():
        return here.gpu()
    probe = "import horovod.torch"
    there = subprocess.run([sys.executable, "-c", probe], capture_output=True)
    if there.returncode == 0:
        return "no need: it can be imported"
    return None if archive() else "no horovod-*.tar.gz beside the checkout"


class Plan:
    """Makes the rows of a machine."""

    def __init__(self, here: Machine):
        self.here = here
        self.device, self.tiny = here.device, here.rehearse
        self.size = 32 if self.tiny else 64  # of images where speed is no matter
        self.full = 32 if self.tiny else 224

    def missing(self, strategy: str, processes: int = 1) -> Callable[[], str | None]:
        """Why a strategy cannot be had, when it is asked for."""
        here = self.here
        return lambda: (
            here.gpu()
            or (here.two(strategy) if processes > 1 else None)
            or here.library(strategy)
        )

    def setting(self, *setting) -> Setting:
        """A setting on this machine's device."""
        return Setting(*setting, device=self.device, image_size=self.size)

    def training(self, *setting) -> Row:
        """Train, and keep the curve."""
        one = self.setting(*setting)
        return Row(
            "training",
            one.name,
            240 if one.compile else 150,
            lambda launch: one_training(launch, one),
            self.missing(one.strategy, one.processes),
        )

    def reference(self, processes: int) -> Row:
        """Train on the CPU, in fp32."""
        one = self.setting("distributed", processes, "fp32")._replace(device="cpu")
        return Row(
            "training",
            f"the CPU's curve, {one.name}",
            120,
            lambda launch: {
                **one_training(launch, one),
                "reference": True,
                "ran on": "CPU",
            },
            self.here.gpu,
        )

    def resume(self, *setting) -> Row:
        """Train in one piece and in two."""
        one = self.setting(*setting)
        return Row(
            "resume",
            one.name,
            360 if one.compile else 300,
            lambda launch: one_resume(launch, one),
            self.missing(one.strategy, one.processes),
        )

    def reaches(self, strategy: str, precision: str) -> Row:
        """Look at what reaches the network."""
        one = self.setting(strategy, 1, precision)
        return Row(
            "input",
            f"{strategy}, {precision}",
            150,
            lambda launch: one_input(launch, one),
            self.missing(strategy),
        )

    def speed(self, strategy: str, precision: str, arch: str = "resnet50") -> Row:
        """Time a script against a bare loop."""
        batch = 4 if self.tiny else 128
        flags = ["--synthetic", batch * TIMED_STEPS, "-b", batch, "--workers", 0]
        flags += ["--arch", "resnet18" if self.tiny else arch]
        flags += ["--device", self.device, "--image-size", self.full]
        flags += precision_flags(precision)
        rounds = 1 if self.tiny else 3
        return Row(
            "speed",
            f"{strategy}, {arch}, {precision}",
            120,
            lambda launch: one_speed(launch, strategy, flags, rounds),
            self.missing(strategy),
            alone=True,
        )

    def network(self, variant: str, *batches: int, limit: int = 60) -> Row:
        """Time a ResNet-50 alone."""
        sizes = (2,) if self.tiny else batches

        def missing() -> str | None:
            if variant in ("cuda-graph", "reduce-overhead") and self.tiny:
                return "CUDA graphs need a GPU"
            return self.here.gpu()

        return Row(
            "model",
            variant,
            limit,
            lambda launch: one_network(launch, variant, self.device, self.full, sizes),
            missing,
            alone=True,
        )

    def timing(self, arch: str, mode: str, strategy: str) -> Row:
        """Launch a strategy as scripts/timings.py does."""
        flags = ["--device", self.device, "--image-size", self.full]
        flags += ["--arch", "resnet18" if self.tiny else arch]
        flags += ["--precision", "fp32" if self.tiny else "fp16"]
        flags += ["--batch-size", 4] if self.tiny else []
        return Row(
            "timings",
            f"{strategy}, {arch}, {mode} mode",
            75,
            lambda launch: one_timing(launch, strategy, mode, flags),
            self.missing(strategy),
            alone=True,
        )

    def build(self) -> Row:
        """Build Horovod where it is missing."""
        return Row(
            "training",
            "build horovod",
            300,
            build_horovod,
            lambda: horovod_build_missing(self.here),
            alone=True,
        )


def rows(here: Machine) -> list[Row]:
    """All rows, the most important ones first."""
    plan = Plan(here)
    apex, horovod = "apex_distributed", "horovod_distributed"
    ddp, spawned, replicas = STRATEGIES
    precisions, levels = ("fp32", "bf16", "fp16"), ("O0", "O1", "O2")

    def trainings(strategy: str, processes: int, compiled: bool = False) -> list[Row]:
        kinds = levels if strategy == apex else precisions
        return [plan.training(strategy, processes, kind, compiled) for kind in kinds]

    def timings(arch: str, mode: str) -> list[Row]:
        names = (*STRATEGIES, horovod, apex)
        first = ddp if arch == "resnet50" else None  # comes before the others
        return [plan.timing(arch, mode, one) for one in names if one != first]

    return [
        plan.reference(1),
        plan.reference(2),
        *trainings(ddp, 1),
        *trainings(apex, 1),
        plan.reaches(ddp, "fp32"),
        plan.reaches(apex, "O1"),
        plan.reaches(apex, "O2"),
        *trainings(ddp, 2),
        plan.resume(ddp, 1, "fp16"),
        plan.resume(apex, 1, "O1"),
        plan.resume(apex, 1, "O2"),
        *trainings(replicas, 1),
        *trainings(spawned, 1),
        plan.speed(ddp, "bf16"),
        plan.network("eager", 64, 128, 256, 512, limit=90),
        plan.network("cuda-graph", 64, 128, 256),
        plan.timing("resnet50", "device", ddp),
        plan.timing("resnet50", "data", ddp),
        plan.build(),
        *trainings(horovod, 1),
        plan.resume(horovod, 1, "fp16"),
        *trainings(ddp, 1, True),
        *trainings(spawned, 2),
        *trainings(apex, 2),
        *trainings(replicas, 2),
        *trainings(horovod, 2),
        plan.resume(ddp, 1, "fp32"),
        plan.resume(replicas, 1, "bf16"),
        plan.resume(ddp, 2, "bf16"),
        plan.reaches(replicas, "fp32"),
        plan.reaches(horovod, "fp32"),
        plan.network("default", 128, limit=150),
        plan.speed(apex, "O1"),
        plan.speed(horovod, "bf16"),
        plan.speed(spawned, "bf16"),
        plan.speed(replicas, "bf16"),
        plan.speed(ddp, "fp32"),
        plan.speed(ddp, "bf16", "resnet18"),
        *timings("resnet50", "device"),
        *timings("resnet50", "data"),
        *(row for one in (replicas, spawned) for row in trainings(one, 1, True)),
        *(row for one in (horovod, apex) for row in trainings(one, 1, True)),
        *(row for one in (ddp, spawned) for row in trainings(one, 2, True)),
        *(row for one in (horovod, apex) for row in trainings(one, 2, True)),
        plan.resume(ddp, 1, "bf16", True),
        plan.network("reduce-overhead", 128, limit=150),
        *timings("resnet18", "device"),
        *timings("resnet18", "data"),
        plan.network("max-autotune-no-cudagraphs", 128, limit=300),
    ]
