"""Train an ImageNet classifier with nn.DataParallel: one process, all GPUs.

Every step copies the model to all GPUs, scatters the batch across them and gathers the
outputs on the first GPU. The script needs no launcher. Without a GPU, it uses the CPU.

    python dataparallel.py --data /path/to/imagenet
    CUDA_VISIBLE_DEVICES=0,1 python dataparallel.py --data /path/to/imagenet
    bash scripts/dataparallel.sh --data /path/to/imagenet

Lines between `# [name]` and `# [/name]` are specific to this strategy. All other lines
of code are the same in all five scripts.
"""

from argparse import Namespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data.distributed import DistributedSampler

from common.arguments import build_parser, parse_arguments
from common.checkpoint import TrainingState
from common.data import DeviceLoader, build_datasets, build_loader
from common.device import autocast_dtype, best_precision, select_device
from common.log import Log
from common.meters import Meter, averages, batch_sums
from common.model import build_model
from common.schedule import build_scheduler
from common.seeding import seed_step
from launch.agreement import agree
from launch.exits import Stopped, Watchdog, exit_status

# [imports]
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from common.errors import UserError
from launch.check import check
# [/imports]


def main(args: Namespace) -> None:
    """Train and validate; every process runs this function."""
    # [1/6 launch] one process uses all GPUs
    rank, world_size, local_world_size = 0, 1, 1
    device = select_device(args.device)
    # [/launch]

    args.precision = args.precision or best_precision(device)
    batch_size = args.global_batch_size // world_size  # this process's images per step
    workers = args.workers // local_world_size  # this process's loader processes
    train_set, val_set = data = build_datasets(args)

    # [2/6 shard] the single process takes every image
    train_sampler = DistributedSampler(
        train_set, num_replicas=world_size, rank=rank, seed=args.seed, drop_last=True
    )
    val_sampler = range(rank, len(val_set), world_size)
    # [/shard]

    share = batch_size, workers, device
    train_loader = build_loader(args, train_set, train_sampler, *share, training=True)
    val_loader = build_loader(args, val_set, val_sampler, *share, training=False)
    # Opens the checkpoint; raises an error if a process has other settings than rank 0
    checkpoint = agree(args, rank, world_size, device, all_reduce, data)

    layout = torch.contiguous_format if args.no_channels_last else torch.channels_last
    raw_model = build_model(args, train_set).to(device, memory_format=layout)
    if args.compile:
        raw_model.compile()
    optimizer = torch.optim.SGD(
        raw_model.parameters(),
        lr=args.lr * args.global_batch_size / 256,  # https://arxiv.org/abs/1706.02677
        momentum=args.momentum,
        weight_decay=args.weight_decay,
    )
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")

    # [3/6 wrap] a forward pass through `model` also splits the batch across the GPUs
    gpus = list(range(torch.cuda.device_count())) if device.type == "cuda" else []
    if args.compile and len(gpus) > 1:
        raise UserError("--compile: nn.DataParallel's replicas cannot be compiled")
    if args.sync_bn:
        raise UserError("--sync-bn: nn.DataParallel has no synchronized batch norm")
    model = raw_model
    if gpus:
        model = nn.DataParallel(model, device_ids=gpus, output_device=gpus[0])
        model.parallel_apply = lasting_threads(gpus)
    eval_model = model
    extra = {}
    # [/wrap]

    scheduler = build_scheduler(args, optimizer, len(train_loader))
    state = TrainingState(args, data, raw_model, optimizer, scheduler, scaler, **extra)
    state.resume(args, rank, checkpoint)
    log = Log(args, state, device, rank, world_size, workers)  # rank 0 prints
    log.start(len(train_loader), batch_size)

    # From here on, a signal only requests a stop, unless there is nothing to save
    watchdog = Watchdog(args.timeout, catch=not args.evaluate)
    if args.evaluate:
        log.validation(validate(args, val_loader, eval_model, watchdog))
    while state.epoch < args.epochs and not args.evaluate and not state.stop_requested:
        train_sampler.set_epoch(state.epoch)
        train(args, rank, train_loader, model, state, log, watchdog)
        if not state.stop_requested:
            val = validate(args, val_loader, eval_model, watchdog)
            log.epoch(state.finish_epoch(val, log.figures()))
        if rank == 0:
            log.write_report()
            state.save()

    # [6/6 finish] nothing to shut down: there is no other process
    # [/finish]
    if state.stop_requested:
        raise Stopped(state.position)


def train(
    args: Namespace,
    rank: int,
    loader: DeviceLoader,
    model: nn.Module,
    state: TrainingState,
    log: Log,
    watchdog: Watchdog,
) -> None:
    """Train one epoch, or the rest of a resumed one; add its metric sums to `state`."""
    model.train()
    meter = Meter()
    loader.first_step = state.step
    log.start_epoch(len(loader))
    for step, (images, labels) in enumerate(loader, start=state.step + 1):
        seed_step(args.seed, state.epoch, step, rank)
        train_step(args, model, state, meter, images, labels)
        state.learning_rate = state.optimizer.param_groups[0]["lr"]
        state.scheduler.step()
        watchdog.feed()
        # Only here does the loop wait for the device and for the other processes
        save = step % args.checkpoint_steps == 0 and step < len(loader)
        if save or step == len(loader) or step % args.print_interval == 0:
            sums = meter.reduce(all_reduce, stop=watchdog.stop_requested)
            log.interval(step, state.add(step, sums), loader.wait_seconds())
            if state.stop_requested:
                break  # main() saves, as it does after the last step
            if save and rank == 0:
                state.save()
    log.end_epoch()


def train_step(
    args: Namespace,
    model: nn.Module,
    state: TrainingState,
    meter: Meter,
    images: Tensor,
    labels: Tensor,
) -> None:
    """Take one optimizer step on the gradients of --accumulate micro-batches."""
    state.optimizer.zero_grad()
    number = args.accumulate
    parts = zip(images.chunk(number), labels.chunk(number), strict=True)
    for part, (x, y) in enumerate(parts, start=1):
        last = part == number
        # [4/6 step] backward() adds up the replicas' gradients on the first GPU
        outputs = forward(args, model, x)
        loss = F.cross_entropy(outputs, y, label_smoothing=args.label_smoothing)
        state.scaler.scale(loss / number).backward()
        if last:
            state.scaler.step(state.optimizer)
            state.scaler.update()
        # [/step]
        meter.add(**batch_sums(loss, outputs, y))


def forward(args: Namespace, model: nn.Module, images: Tensor) -> Tensor:
    """Return float32 logits (B, classes) for normalized images (B, 3, S, S)."""
    dtype = autocast_dtype(args.precision)
    with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
        return model(images).float()


@torch.no_grad()
def validate(
    args: Namespace, loader: DeviceLoader, eval_model: nn.Module, watchdog: Watchdog
) -> dict[str, float]:
    """Return metrics averaged over all validation images, equal in all processes."""
    broadcast_buffers(eval_model)
    eval_model.eval()
    meter = Meter()
    for images, labels in loader:
        outputs = forward(args, eval_model, images)
        meter.add(**batch_sums(F.cross_entropy(outputs, labels), outputs, labels))
        watchdog.feed()
    return averages(meter.reduce(all_reduce, stop=watchdog.stop_requested))


# [5/6 combine] the single process already has all sums and buffers
def all_reduce(sums: Tensor) -> Tensor:
    """Sum a tensor over all processes."""
    return sums


def broadcast_buffers(model: nn.Module) -> None:
    """Copy rank 0's batch norm statistics, which it saves, to all processes."""


# [/combine]


# [start]
def lasting_threads(gpus: list[int]) -> Callable:
    """Return a parallel_apply() for nn.DataParallel with one thread for each GPU.

    nn.DataParallel itself starts new threads in each step. With cudnn.benchmark, cuDNN
    searches for algorithms again in every new thread, and since 2.10, PyTorch never
    frees the results: https://github.com/pytorch/pytorch/issues/104701. The new threads
    also run bf16 as fp16, because autocast's dtype is thread-local.
    """
    threads = [ThreadPoolExecutor(1) for _ in gpus]

    def apply(replicas: list, inputs: list, kwargs: list) -> list:
        grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda")
        streams = map(torch.cuda.current_stream, gpus)

        def run(
            stream: torch.cuda.Stream, replica: nn.Module, given: tuple, named: dict
        ) -> Tensor:
            with (
                torch.cuda.stream(stream),  # on its GPU
                torch.set_grad_enabled(grad),
                torch.autocast("cuda", dtype, enabled=autocast),
            ):
                return replica(*given, **named)

        parts = zip(threads, streams, replicas, inputs, kwargs, strict=False)
        running = [thread.submit(run, *one) for thread, *one in parts]
        return [one.result() for one in running]

    return apply


def arguments(argv: list[str] | None = None) -> Namespace:
    """Parse the command line."""
    return parse_arguments(build_parser(__doc__), "dataparallel", argv)


if __name__ == "__main__":
    with exit_status():
        args = arguments()
        check(args, 1)
        main(args)
# [/start]
