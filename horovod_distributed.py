"""Train an ImageNet classifier with Horovod, one process per GPU.

horovodrun or mpirun starts the processes. hvd.DistributedOptimizer averages the
gradients over NCCL, MPI or Gloo while the backward pass is still running.

    horovodrun --gloo -np 4 python horovod_distributed.py --data /path/to/imagenet
    mpirun -np 4 --bind-to none python horovod_distributed.py --data /path/to/imagenet
    bash scripts/horovod_distributed.sh --data /path/to/imagenet   # one process per GPU

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

from common.errors import UserError
from launch.forkserver import use_fork_server
from common.model import InMemoryOrder, contiguous_view

try:
    import horovod.torch as hvd
except ImportError as error:
    hvd, hvd_problem = None, error
# [/imports]


def main(args: Namespace) -> None:
    """Train and validate; every process runs this function."""
    # [1/6 launch] Horovod gets this process's rank from horovodrun or MPI
    if args.workers and not args.synthetic:
        use_fork_server()  # a forked loader would inherit Horovod's and MPI's state
    timeout = int(args.timeout.total_seconds())
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(timeout))
    hvd.init()
    rank, local_rank, world_size = hvd.rank(), hvd.local_rank(), hvd.size()
    local_world_size = hvd.local_size()
    device = select_device(args.device, local_rank)
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

    # [3/6 wrap] the optimizer's hooks average gradients during backward()
    if args.sync_bn:  # Horovod has no converter, but its layer has the same weights
        for layer in raw_model.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.__class__ = hvd.SyncBatchNorm
    compression = getattr(hvd.Compression, args.compress_gradients or "none")
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        raw_model.named_parameters(),
        InMemoryOrder(compression),
        backward_passes_per_step=args.accumulate,
    )
    weights = {name: contiguous_view(w) for name, w in raw_model.state_dict().items()}
    hvd.broadcast_parameters(weights, root_rank=0)
    # hvd.broadcast_optimizer_state() is for state that only rank 0 has. Here, all ranks
    # load the checkpoint. With a new SGD optimizer, the call also takes a hidden step.
    model = eval_model = raw_model
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

    # [6/6 finish] every process waits until rank 0 has saved
    hvd.barrier()
    hvd.shutdown()
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
        # [4/6 step] Horovod averages during the last backward(); synchronize() waits
        outputs = forward(args, model, x)
        loss = F.cross_entropy(outputs, y, label_smoothing=args.label_smoothing)
        state.scaler.scale(loss / number).backward()
        if last:
            state.optimizer.synchronize()
            with state.optimizer.skip_synchronize():
                state.scaler.step(state.optimizer)  # all skip the step on overflow
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
    return hvd.allreduce(sums, op=hvd.Sum, name="sums")  # a new tensor


def broadcast_buffers(model: nn.Module) -> None:
    """Copy rank 0's batch norm statistics, which it saves, to all processes."""
    hvd.broadcast_parameters(dict(model.named_buffers()), root_rank=0)


# [/combine]


# [start]
def arguments(argv: list[str] | None = None) -> Namespace:
    """Parse the command line and check that Horovod is installed."""
    parser = build_parser(__doc__)
    half = "round gradients to this type before averaging"
    parser.add_argument("--compress-gradients", choices=("fp16",), help=half)
    args = parse_arguments(parser, "horovod_distributed", argv)
    if hvd is None:
        raise UserError(
            f"Horovod is missing ({hvd_problem}): bash scripts/install_horovod.sh"
        )
    if args.device != "cpu" and torch.cuda.is_available() and not hvd.nccl_built():
        raise UserError(
            "this Horovod lacks NCCL; see docs/running.md#horovod-and-apex, or use "
            "--device cpu"
        )
    return args


if __name__ == "__main__":
    with exit_status():
        main(arguments())
# [/start]
