"""Train an ImageNet classifier with DistributedDataParallel and torch.multiprocessing.

    python multiprocessing_distributed.py --data /path/to/imagenet [--nprocs 2]

The five scripts differ only in the lines between `# [name]` and `# [/name]`.
"""

from argparse import Namespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data.distributed import DistributedSampler

from common.arguments import build_parser, choose_defaults, divide, parse_arguments
from common.checkpoint import Checkpoint
from common.data import DeviceLoader, EpochSampler, build_datasets, seed_generators
from common.errors import UserError, one_line_errors
from common.meters import Meter, Metrics, Progress, averages, batch_sums, format_metrics
from common.model import PRECISIONS, build_model, build_scheduler

# [imports]
import os
from contextlib import nullcontext

import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks
from torch.nn.parallel import DistributedDataParallel as DDP

from common.model import die_with_parent, set_up_cuda
# [/imports]


def main(args: Namespace) -> None:
    """Train and validate; every process runs this function."""
    # [1/6 launch] mp.spawn has passed this process's local rank to worker()
    local_rank, local_world_size = args.local_rank, args.nprocs
    rank = args.node_rank * local_world_size + local_rank
    world_size = args.nnodes * local_world_size
    where = {"init_method": args.dist_url, "rank": rank, "world_size": world_size}
    if torch.cuda.is_available():
        set_up_cuda(local_world_size)
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **where)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", **where)
    # [/launch]

    batch_size = divide(args.global_batch_size, world_size, "processes")
    micro_batch_size = divide(batch_size, args.accumulate, "micro-batches")
    choose_defaults(args, device, local_world_size)  # for --precision, --workers
    train_set, val_set = build_datasets(args)

    # [2/6 shard] each process takes every world_size-th image of one shuffled list
    train_share = DistributedSampler(
        train_set, num_replicas=world_size, rank=rank, seed=args.seed, drop_last=True
    )
    val_share = range(rank, len(val_set), world_size)  # no padding, no duplicates
    # [/shard]

    train_sampler = EpochSampler(train_share, args.seed, rank, world_size)
    train_loader = DeviceLoader(
        args, train_set, train_sampler, batch_size, device, training=True
    )
    val_sampler = EpochSampler(val_share, args.seed, rank, world_size)
    val_loader = DeviceLoader(  # micro-batches, because these fit in memory
        args, val_set, val_sampler, micro_batch_size, device, training=False
    )

    raw_model = build_model(args, train_set.classes, rank)
    raw_model = raw_model.to(device, memory_format=torch.channels_last)
    lr = args.lr * args.global_batch_size / 256  # https://arxiv.org/abs/1706.02677
    optimizer = torch.optim.SGD(
        raw_model.parameters(), lr, args.momentum, weight_decay=args.weight_decay
    )
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")

    # [3/6 wrap] train model, which averages raw_model's gradients; validate eval_model
    if args.sync_bn:
        raw_model = nn.SyncBatchNorm.convert_sync_batchnorm(raw_model)
    model = DDP(raw_model, gradient_as_bucket_view=True)  # copies rank 0's state
    model.broadcast_buffers = False  # the argument would also skip this copy
    if args.compress_gradients:
        compress = {"fp16": hooks.fp16_compress_hook, "bf16": hooks.bf16_compress_hook}
        model.register_comm_hook(None, compress[args.compress_gradients])
    eval_model = raw_model  # never communicates, so shards may differ in length
    to_save = {"state_dict": eval_model}  # the weights in checkpoints
    # [/wrap]

    scheduler = build_scheduler(args, optimizer, len(train_loader))
    to_save |= {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    checkpoint = Checkpoint(args, (train_set, val_set), to_save)
    checkpoint.load(rank)  # only with --resume; rank 0 also locks --output
    checkpoint.compare_ranks(rank, world_size, device, all_reduce)
    if rank == 0:
        checkpoint.print_header(device, world_size, steps=len(train_loader))
    if args.evaluate:  # no training follows
        val = validate(args, val_loader, eval_model)
        if rank == 0:
            print(f"val {format_metrics(val, names=val)}")

    for epoch in range(checkpoint.epoch, 0 if args.evaluate else args.epochs):
        train_sampler.set_epoch(epoch, skip=checkpoint.step * batch_size)  # per rank
        speed = train(
            args, rank, train_loader, model, optimizer, scheduler, scaler, checkpoint
        )
        val = validate(args, val_loader, eval_model)
        checkpoint.record_epoch(val, speed)
        if rank == 0:
            checkpoint.save()
            checkpoint.print_epoch()

    # [6/6 finish] wait for rank 0, which may still be saving
    dist.barrier()
    dist.destroy_process_group()
    # [/finish]


def train(
    args: Namespace,
    rank: int,
    loader: DeviceLoader,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    scaler: torch.amp.GradScaler,
    checkpoint: Checkpoint,
) -> Metrics:
    """Train one epoch, or the rest of a resumed one; return its speed and memory."""
    model.train()
    meter, epoch, done = Meter(), checkpoint.epoch, checkpoint.step
    batches = Progress(f"epoch {epoch + 1}/{args.epochs}", loader, done)
    for step, (images, labels) in enumerate(batches, start=done + 1):
        seed_generators(args.seed, epoch, step, rank + 1)  # for dropout, for example
        optimizer.zero_grad()
        micro_batches = images.chunk(args.accumulate), labels.chunk(args.accumulate)
        for number, (x, y) in enumerate(zip(*micro_batches, strict=True), start=1):
            last = number == args.accumulate
            # [4/6 step] DDP averages the gradients only in the last backward()
            with nullcontext() if last else model.no_sync():
                outputs = forward(args, model, x)
                loss = F.cross_entropy(outputs, y, label_smoothing=args.label_smoothing)
                scaler.scale(loss / args.accumulate).backward()
            if last:
                scaler.step(optimizer)
                scaler.update()
            # [/step]
            meter.add(batch_sums(loss, outputs, y))
        learning_rate = optimizer.param_groups[0]["lr"]
        scheduler.step()
        if step % args.print_interval == 0 or step == len(loader):
            sums = meter.reduce(all_reduce)  # waits for a GPU (fp16: scaler.step() too)
            checkpoint.record_interval(step, sums)
            batches.show_interval(step, averages(sums), learning_rate)
            if rank == 0 and step < len(loader):
                checkpoint.save_if_due()
    return {**batches.epoch_stats(), "learning_rate": learning_rate}


def forward(args: Namespace, model: nn.Module, images: Tensor) -> Tensor:
    """Return float32 logits (B, classes) for normalized images (B, 3, S, S)."""
    dtype = PRECISIONS[args.precision]
    with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
        return model(images).float()


@torch.no_grad()
def validate(args: Namespace, loader: DeviceLoader, eval_model: nn.Module) -> Metrics:
    """Return metrics averaged over all validation images, the same in all processes."""
    broadcast_buffers(eval_model)
    eval_model.eval()
    meter = Meter()
    for images, labels in Progress("validation", loader):
        outputs = forward(args, eval_model, images)
        meter.add(batch_sums(F.cross_entropy(outputs, labels), outputs, labels))
    return averages(meter.reduce(all_reduce))


# [5/6 combine] sum over all processes; copy rank 0's buffers to every process
def all_reduce(sums: Tensor) -> Tensor:
    """Sum a tensor over all processes."""
    dist.all_reduce(sums)
    return sums


def broadcast_buffers(model: nn.Module) -> None:
    """Copy rank 0's batch norm statistics to all processes (rank 0 saves them)."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


# [/combine]


# [start]
def arguments() -> Namespace:
    """Parse the command line."""
    parser = build_parser(__doc__)
    add = parser.add_argument
    add("--sync-bn", action="store_true", help="synchronize batch norm over all GPUs")
    add("--compress-gradients", choices=("fp16", "bf16"), help="dtype for averaging")
    add("--nprocs", type=int, default=torch.cuda.device_count() or 2, help="GPUs, or 2")
    add("--nnodes", type=int, default=1, help="number of machines (1)")
    add("--node-rank", type=int, default=0, help="rank of this machine (0)")
    add("--dist-url", help="tcp://HOST:PORT of the first machine, if there are several")
    return parse_arguments(parser)


def worker(local_rank: int, args: Namespace) -> None:
    """Run main() in a spawned process."""
    die_with_parent()
    args.local_rank = local_rank
    with one_line_errors():
        main(args)


if __name__ == "__main__":
    with one_line_errors():
        args = arguments()
        if (args.nnodes > 1 and not args.dist_url) or args.node_rank >= args.nnodes:
            raise UserError("--nnodes N needs --dist-url and a --node-rank below N")
        set_up_cuda(args.nprocs)  # in the parent, which prints errors only once
    if args.dist_url is None:  # meet through a file in memory: nobody else can connect
        args.dist_url = f"file:///proc/{os.getpid()}/fd/{os.memfd_create('meeting')}"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # like torchrun
    try:
        mp.spawn(worker, args=(args,), nprocs=args.nprocs)
    except mp.ProcessExitedException as error:  # 2: it has printed a UserError
        raise SystemExit(2 if error.exit_code == 2 else str(error)) from None
# [/start]
