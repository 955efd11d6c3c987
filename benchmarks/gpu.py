"""What scripts/gpu_check.py measures on the device, each call in a process of its own.

    python -m benchmarks.gpu input SCRIPT FILE FLAGS...      what reaches the network
    python -m benchmarks.gpu speed SCRIPT FILE ROUNDS FLAGS...
    python -m benchmarks.gpu model VARIANT FILE DEVICE SIZE BATCH...    a ResNet-50
    python -m benchmarks.gpu timing STRATEGY FILE MODE FLAGS...

FLAGS are those of SCRIPT, or of scripts/timings.py. What was found goes to FILE as
JSON; scripts/gpu_check.py judges it.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data.distributed import DistributedSampler
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import usual, usual_training
from benchmarks.comparison import compared, interleave
from benchmarks.step import STEPS, bare_loop
from common.arguments import build_parser, parse_arguments
from common.data import DeviceLoader, build_datasets, build_loader, share_out
from common.device import peak_memory_mib
from common.errors import UserError, exit_status
from common.launch import Watchdog
from common.machines import use_loopback

ROOT = Path(__file__).resolve().parent.parent
BARE, USUAL, USUAL_SAME = "bare loop", "usual, fp32", "usual, same precision"
# Where the time of a step goes, by the names of PyTorch's operators
KINDS = {"convolution": "conv", "batch norm": "batch_norm", "matrix product": "mm"}


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


# --- what reaches the network ---


def inputs(name: str, flags: list[str]) -> list[Tensor]:
    """What the first convolution gets in training: (B, 3, S, S) float32, on the CPU."""
    script = importlib.import_module(name)
    build, seen = script.build_model, []

    def watched(args: Namespace, classes: int) -> nn.Module:
        model = build(args, classes)
        first = next(part for part in model.modules() if isinstance(part, nn.Conv2d))

        def keep(part: nn.Module, given: tuple[Tensor]) -> None:
            if part.training:
                seen.append(given[0].detach().float().cpu())

        first.register_forward_pre_hook(keep)
        return model

    script.build_model = watched
    start_alone(script, flags)
    return seen


def expected_inputs(flags: list[str]) -> list[Tensor]:
    """The same batches as floats made on the CPU in the usual way."""
    args = parse_arguments(build_parser(__doc__), "input", flags)
    args.workers = 0
    share_out(args, 0, 1, 1)
    train_set, _ = build_datasets(args)
    sampler = DistributedSampler(train_set, 1, 0, seed=args.seed, drop_last=True)
    loader = build_loader(args, train_set, sampler, torch.device("cpu"), training=True)
    return [usual.NORMALISE(images / 255) for images, _ in loader.loader]


def check_input(name: str, *flags: str) -> dict:
    """How far what reaches the network is from what should."""
    shared = list(flags)
    if "--opt-level" in shared:
        at = shared.index("--opt-level")
        del shared[at : at + 2]
    found, expected = inputs(name, list(flags)), expected_inputs(shared)
    differences = [
        (one - other).abs().max().item()
        for one, other in zip(found, expected, strict=True)
    ]
    return {"largest_difference": max(differences), "batches": len(differences)}


# --- a script against a bare loop ---


def usual_loop(args: Namespace, loader: DeviceLoader, dtype: torch.dtype) -> Callable:
    """Steps as usual scripts take them: floats on the host, figures read at once."""
    device = loader.device
    model = torchvision.models.get_model(args.arch).to(device)
    if torch.distributed.is_initialized():
        gpus = [device.index] if device.type == "cuda" else None
        model = nn.parallel.DistributedDataParallel(model, device_ids=gpus)
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
    kernels = None
    if name == "apex_distributed":
        from apex.multi_tensor_apply import multi_tensor_applier

        kernels = multi_tensor_applier.available
    return {"rows": found, "apex_kernels": kernels}


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


def training_step(model: nn.Module, images: Tensor, labels: Tensor) -> Callable:
    """A bf16 step of SGD on one batch."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9, weight_decay=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        # Without the cache of casts a step can be captured into a CUDA graph
        with torch.autocast(images.device.type, torch.bfloat16, cache_enabled=False):
            outputs = model(images)
        loss = F.cross_entropy(outputs.float(), labels)
        loss.backward()
        optimizer.step()

    return step


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step as one CUDA graph.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def kinds_of_work(step: Callable[[], None], device: torch.device) -> dict[str, float]:
    """Shares of a step's wall time by kind of operator, and all of them as "busy"."""
    on_gpu = device.type == "cuda"
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    synchronise(device)
    began = time.perf_counter()
    for _ in range(3):
        step()
    synchronise(device)
    seconds = time.perf_counter() - began  # without the profiler, which slows down
    with profile(activities=kinds) as profiler:
        for _ in range(3):
            step()
        synchronise(device)
    shares = dict.fromkeys((*KINDS, "rest"), 0.0)
    for event in profiler.key_averages():
        if event.device_type != torch.autograd.DeviceType.CPU:
            continue  # kernels, which are in their operators' time already
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        kind = next((k for k, word in KINDS.items() if word in event.key), "rest")
        shares[kind] += spent / 1e6 / seconds
    return {**shares, "busy": sum(shares.values())}


def network_speed(variant: str, device_name: str, size: str, *batches: str) -> dict:
    """Speed, memory and share of the matrix rate of a ResNet-50 in bf16, channels_last.

    `variant` is eager, cuda-graph, or a mode of torch.compile.
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
    torch.manual_seed(0)
    model = torchvision.models.resnet50().to(device, memory_format=torch.channels_last)
    images = torch.randn(batch, 3, size, size, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,), device=device)
    step = training_step(model, images, labels)
    with FlopCounterMode(display=False) as counter:
        step()
    if variant not in ("eager", "cuda-graph"):
        model.compile(mode=variant)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    run = captured(step) if variant == "cuda-graph" else step
    repeats = 10 if device.type == "cuda" else 1
    began = time.perf_counter()
    for _ in range(1 + repeats // 4):
        run()
    synchronise(device)
    seconds = time.perf_counter() - began
    measure = timed(lambda: [run() for _ in range(repeats)], repeats * batch, device)
    speed = sorted(measure() for _ in range(3))[1]
    work = counter.get_total_flops() / batch
    return {
        "images_per_second": speed,
        "gflop_per_image": work / 1e9,
        "share_of_matrix_rate": speed * work / rate,
        "first_steps_seconds": seconds,
        "peak_memory_mib": peak_memory_mib(device),
        "time": kinds_of_work(step, device) if variant == "eager" else None,
    }


# --- a row of scripts/timings.py ---


def one_timing(strategy: str, file: str, mode: str, *flags: str) -> dict:
    """What scripts/timings.py measures of one strategy on one device."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import tempfile

    import timings

    args = timings.parse(list(flags))
    cell = timings.Cell(mode, 1, args.batch_size, args.precision[0])
    with tempfile.TemporaryDirectory() as folder:
        if mode == "data":
            args.devices = [1]
            data = timings.own_data(args)
            args.data = timings.short_validation(data, Path(folder))
        run = timings.Run(cell, strategy, 1)
        try:
            return timings.launch(args, run, Path(file).with_suffix(".log"))
        except timings.Failed as failed:
            raise UserError(str(failed)) from None


def main() -> None:
    """Do what the command line asks for."""
    what, which, file, *others = sys.argv[1:]
    if what == "timing":
        found = one_timing(which, file, *others)
    else:
        found = {
            "input": check_input,
            "speed": compare_speed,
            "model": network_speed,
        }[what](which, *others)
    Path(file).write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.flush()
    os._exit(0)  # libraries of a job that was left half-way need not clean up


if __name__ == "__main__":
    with exit_status():
        main()
