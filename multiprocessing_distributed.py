"""Train an ImageNet classifier with DistributedDataParallel and torch.multiprocessing.

The script is its own launcher: mp.spawn starts one process per GPU.

    python multiprocessing_distributed.py --data /path/to/imagenet [--nprocs 2]

Lines between `# [name]` and `# [/name]` are specific to this strategy. All other lines
of code are the same in all five scripts.
"""

from argparse import Namespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data.distributed import DistributedSampler

from common.arguments import build_parser, parse_arguments
from common.checkpoint import Checkpoint
from common.data import DeviceLoader, build_datasets, build_loader, seed_generators
from common.errors import one_line_errors
from common.meters import Meter, Timer, averages, batch_sums, in_words
from common.model import PRECISIONS, best_precision, build_model, build_scheduler

# [imports]
import ctypes
import os
import signal
import socket
import sys
from contextlib import nullcontext

import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
# [/imports]


def main(args: Namespace) -> None:
    """Train and validate; every process runs this function."""
    # [1/6 launch] mp.spawn has passed this process's local rank to worker()
    local_rank, world_size = args.local_rank, args.nnodes * args.nprocs
    rank = args.node_rank * args.nprocs + local_rank
    where = {"init_method": args.dist_url, "rank": rank, "world_size": world_size}
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
        dist.init_process_group("nccl", device_id=device, **where)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", **where)
    # [/launch]

    args.precision = args.precision or best_precision(device)
    train_set, val_set = build_datasets(args)

    # [2/6 shard] each process takes every world_size-th image of one shuffled list
    train_sampler = DistributedSampler(
        train_set, num_replicas=world_size, rank=rank, seed=args.seed, drop_last=True
    )
    val_sampler = range(rank, len(val_set), world_size)  # no padding, no duplicates
    # [/shard]

    train_loader = build_loader(
        args, train_set, train_sampler, rank, world_size, device, training=True
    )
    val_loader = build_loader(
        args, val_set, val_sampler, rank, world_size, device, training=False
    )

    raw_model = build_model(args, train_set.classes)
    raw_model = raw_model.to(device, memory_format=torch.channels_last)
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
    if args.sync_bn:
        raw_model = nn.SyncBatchNorm.convert_sync_batchnorm(raw_model)
    model = DDP(raw_model, gradient_as_bucket_view=True)
    if args.compress_gradients:
        hook = getattr(default_hooks, f"{args.compress_gradients}_compress_hook")
        model.register_comm_hook(None, hook)
    eval_model = raw_model  # without DDP: shards may differ in length
    saved = {"state_dict": eval_model}  # what checkpoints hold; more follows below
    # [/wrap]

    scheduler = build_scheduler(args, optimizer, len(train_loader))
    saved |= {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    checkpoint = Checkpoint(args, (train_set, val_set), saved)
    checkpoint.load(rank, world_size, device, all_reduce)  # checks that all agree
    if rank == 0:
        print(f"{args.arch} {args.precision}, {world_size} x {device.type}", flush=True)
    if args.evaluate:
        val = validate(args, val_loader, eval_model)
        if rank == 0:
            print(f"val {in_words(val)}, {val['images']} images")

    for epoch in range(checkpoint.epoch, 0 if args.evaluate else args.epochs):
        train_sampler.set_epoch(epoch)
        seed_generators(args.seed, epoch, 0, rank + 1)  # a sampler may draw from them
        figures = train(
            args, rank, train_loader, model, optimizer, scheduler, scaler, checkpoint
        )
        val = validate(args, val_loader, eval_model)
        record = checkpoint.finish_epoch(val, figures)
        if rank == 0:
            checkpoint.save()
            print(f"epoch {epoch + 1}/{args.epochs}: {in_words(record)}", flush=True)

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
) -> dict[str, float]:
    """Train one epoch, or the rest of a resumed one; return its statistics."""
    model.train()
    meter, timer = Meter(), Timer()
    epoch, done = checkpoint.epoch, checkpoint.step
    for step, (images, labels) in enumerate(loader.epoch(epoch, done), start=done + 1):
        seed_generators(args.seed, epoch, step, rank + 1)  # dropout draws from them
        optimizer.zero_grad()
        micro_batches = images.chunk(args.accumulate), labels.chunk(args.accumulate)
        for part, (x, y) in enumerate(zip(*micro_batches, strict=True), start=1):
            last = part == len(micro_batches[0])
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
        # The loop waits for a GPU only here; a scaler or hooks may wait in each step
        if step % args.print_interval == 0 or step == len(loader):
            recent = checkpoint.add(step, meter.reduce(all_reduce))
            speed = timer.interval(step, recent["images"], loader.waited)
            if rank == 0:
                if step < len(loader):
                    checkpoint.save_if_due()
                where = f"epoch {epoch + 1}/{args.epochs}, step {step}/{len(loader)}"
                print(f"{where}: {in_words(recent)}, {speed}", flush=True)
    return {**timer.figures(loader.device), "learning_rate": learning_rate}


def forward(args: Namespace, model: nn.Module, images: Tensor) -> Tensor:
    """Return float32 logits (B, classes) for normalized images (B, 3, S, S)."""
    dtype = PRECISIONS[args.precision]
    with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
        return model(images).float()


@torch.no_grad()
def validate(
    args: Namespace, loader: DeviceLoader, eval_model: nn.Module
) -> dict[str, float]:
    """Return metrics averaged over all validation images, the same in all processes."""
    broadcast_buffers(eval_model)
    eval_model.eval()
    meter = Meter()
    for images, labels in loader.epoch(0):
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
    args = parse_arguments(parser)
    if (args.nnodes > 1 and not args.dist_url) or args.node_rank >= args.nnodes:
        parser.error("--nnodes N needs --dist-url and a --node-rank from 0 to N - 1")
    return args


def worker(local_rank: int, args: Namespace) -> None:
    """Run main() in a spawned process."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the parent
    args.local_rank = local_rank
    with one_line_errors():
        main(args)


if __name__ == "__main__":
    with one_line_errors():
        args = arguments()
    if args.dist_url is None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))  # a free port
            args.dist_url = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    try:
        mp.spawn(worker, args=(args,), nprocs=args.nprocs)
    except mp.ProcessExitedException as error:
        if error.exit_code != 2:  # after a UserError, the process has printed its line
            raise
        sys.exit(2)
# [/start]
