"""Train an ImageNet classifier with DistributedDataParallel and torch.multiprocessing.

The script is its own launcher: mp.spawn starts one process per GPU.

    python multiprocessing_distributed.py --data /path/to/imagenet [--nprocs 2]
    bash scripts/multiprocessing_distributed.sh --data /path/to/imagenet

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
from contextlib import nullcontext

import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

from launch.check import check, set_threads
from launch.spawn import add_spawn_flags, check_spawn_flags, rendezvous, wait_for
# [/imports]


def main(args: Namespace) -> None:
    """Train and validate; every process runs this function."""
    # [1/6 launch] mp.spawn passed this process's local rank to worker()
    local_rank, local_world_size = args.local_rank, args.nprocs
    rank = args.node_rank * args.nprocs + local_rank
    world_size = args.nnodes * args.nprocs
    device = select_device(args.device, local_rank, args.backend)
    backend = args.backend or ("nccl" if device.type == "cuda" else "gloo")
    dist.init_process_group(backend, args.dist_url, args.timeout, world_size, rank)
    # [/launch]

    args.precision = args.precision or best_precision(device)
    batch_size = args.global_batch_size // world_size  # this process's images per step
    workers = args.workers // local_world_size  # this process's loader processes
    train_set, val_set = data = build_datasets(args)

    # [2/6 shard] each process takes every world_size-th image of one shuffled list
    train_sampler = DistributedSampler(
        train_set, num_replicas=world_size, rank=rank, seed=args.seed, drop_last=True
    )
    val_sampler = range(rank, len(val_set), world_size)  # no padding, no duplicates
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

    # [3/6 wrap] a backward pass through `model` also averages the gradients
    gpus = [device.index] if device.type == "cuda" else None
    if args.sync_bn:
        raw_model = nn.SyncBatchNorm.convert_sync_batchnorm(raw_model)
    model = DDP(raw_model, device_ids=gpus, gradient_as_bucket_view=True)
    model.broadcast_buffers = False  # validate() broadcasts buffers instead
    if args.compress_gradients:
        hook = getattr(default_hooks, f"{args.compress_gradients}_compress_hook")
        model.register_comm_hook(None, hook)
    eval_model = raw_model
    extra = {}  # more state to save and resume
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

    # [6/6 finish] every process waits until rank 0 has saved the checkpoint
    dist.barrier(device_ids=gpus)
    dist.destroy_process_group()
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
        # [4/6 step] DDP averages the gradients only in the last backward()
        with nullcontext() if last else model.no_sync():
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


# [5/6 combine] sum over all processes; copy rank 0's buffers to every process
def all_reduce(sums: Tensor) -> Tensor:
    """Sum a tensor over all processes."""
    dist.all_reduce(sums)
    return sums


def broadcast_buffers(model: nn.Module) -> None:
    """Copy rank 0's batch norm statistics, which it saves, to all processes."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


# [/combine]


# [start]
def arguments(argv: list[str] | None = None) -> Namespace:
    """Parse the command line."""
    parser = build_parser(__doc__)
    add_spawn_flags(parser)
    half = "round gradients to this type before averaging"
    parser.add_argument("--compress-gradients", choices=("fp16", "bf16"), help=half)
    args = parse_arguments(parser, "multiprocessing_distributed", argv)
    check_spawn_flags(args)
    return args


def worker(local_rank: int, args: Namespace) -> None:
    """Run main() in a spawned process."""
    mp.set_start_method("fork", force=True)  # spawned loader processes start slowly
    args.local_rank = local_rank
    with exit_status(local_rank):
        main(args)


if __name__ == "__main__":
    with exit_status():
        args = arguments()
        check(args, args.nprocs)
        set_threads(args.nprocs)
        with rendezvous(args) as args.dist_url:
            wait_for(mp.spawn(worker, args=(args,), nprocs=args.nprocs, join=False))
# [/start]
