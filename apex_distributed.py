"""Train an ImageNet classifier with NVIDIA Apex: amp mixed precision and Apex's DDP.

amp.initialize prepares the model and optimizer for --opt-level: O0 is fp32, O1 casts
operations, O2 casts the model and keeps fp32 master weights. Apex's DDP averages the
gradients. Tag 25.05 is the last Apex release with amp and DDP. Both need CUDA GPUs.

    torchrun --nproc-per-node=4 apex_distributed.py --data /path/to/imagenet
    bash scripts/apex_distributed.sh --data /path/to/imagenet --opt-level O2

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
import os

import torch.distributed as dist

from common.device import require_gpu
from common.errors import UserError
from launch.ranks import add_launcher_flags, ranks_from_environment

try:
    from apex import amp
    from apex.parallel import DistributedDataParallel as ApexDDP
except ImportError as error:
    amp, problem = None, error
# [/imports]


def main(args: Namespace) -> None:
    """Train and validate; every process runs this function."""
    # [1/6 launch] the launcher has set this process's rank in the environment
    rank, local_rank, world_size, local_world_size = ranks_from_environment(os.environ)
    device = select_device(args.device, local_rank, args.backend)
    backend = args.backend or "nccl"
    dist.init_process_group(backend, None, args.timeout, world_size, rank)
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

    # [3/6 wrap] amp first, then Apex's DDP, whose backward pass averages gradients
    raw_model.to(memory_format=torch.contiguous_format)  # required by amp_C
    if args.sync_bn:  # Apex's converter would replace weights that `optimizer` has
        raw_model = nn.SyncBatchNorm.convert_sync_batchnorm(raw_model)
    prepared = amp.initialize(raw_model, optimizer, opt_level=args.opt_level)
    raw_model, optimizer = prepared
    model = ApexDDP(raw_model)
    eval_model = raw_model  # amp casts in validation too
    extra = {"amp": amp}
    if args.opt_level == "O2":
        optimizer.zero_grad()  # creates the fp32 master weights for resume()
        extra["masters"] = nn.ParameterList(amp.master_params(optimizer))
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
    dist.barrier(device_ids=[device.index])
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
        # [4/6 step] amp scales the loss; Apex's DDP averages in the last backward()
        model.enable_allreduce() if last else model.disable_allreduce()
        outputs = forward(args, model, x)
        loss = F.cross_entropy(outputs, y, label_smoothing=args.label_smoothing)
        share, delay = loss / number, not last
        with amp.scale_loss(share, state.optimizer, delay_unscale=delay) as scaled_loss:
            scaled_loss.backward()
        if last:
            state.optimizer.step()
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
    """Parse the command line and check that Apex can run."""
    parser = build_parser(__doc__)
    add_launcher_flags(parser)
    parser.add_argument("--opt-level", choices=("O0", "O1", "O2", "O3"), help="(O1)")
    args = parse_arguments(parser, "apex_distributed", argv)
    require_gpu(args.device, "Apex")
    if args.precision == "bf16" or (args.precision and args.opt_level):
        parser.error("Apex: use --opt-level, not --precision; bf16 is not supported")
    args.opt_level = args.opt_level or ("O0" if args.precision == "fp32" else "O1")
    args.precision = args.opt_level  # amp casts instead of torch.autocast
    if amp is None:
        install = "pip install --no-build-isolation git+https://github.com/NVIDIA/apex"
        raise UserError(f"Apex's amp or DDP is missing ({problem}): {install}@25.05")
    return args


if __name__ == "__main__":
    with exit_status():
        main(arguments())
# [/start]
