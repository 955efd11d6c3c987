"""Train an ImageNet classifier with nn.DataParallel: one process, all GPUs.

In every step, nn.DataParallel copies the model to all GPUs, scatters the batch across
them and gathers the outputs on the first GPU. The script needs no launcher.

    python dataparallel.py --data /path/to/imagenet
    CUDA_VISIBLE_DEVICES=0,1 python dataparallel.py --data /path/to/imagenet

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
from common.model import set_up_cuda
# [/imports]


def main(args: Namespace) -> None:
    """Train and validate; every process runs this function."""
    # [1/6 launch] one process uses all GPUs
    rank, world_size, local_world_size = 0, 1, 1
    gpus = torch.cuda.device_count()
    if gpus:
        set_up_cuda(local_world_size)
    device = torch.device("cuda" if gpus else "cpu")
    # nn.DataParallel starts new threads in each step. With cudnn.benchmark, cuDNN
    # searches again in each thread (https://github.com/pytorch/pytorch/pull/169153)
    torch.backends.cudnn.benchmark = gpus == 1
    if gpus > 1 and args.precision == "bf16":
        raise UserError("--precision bf16: nn.DataParallel's threads would use fp16")
    if gpus > 1 and args.compile:
        raise UserError("--compile: nn.DataParallel's replicas cannot be compiled")
    if gpus > 1:
        args.precision = args.precision or "fp32"
    # [/launch]

    batch_size = divide(args.global_batch_size, world_size, "processes")
    micro_batch_size = divide(batch_size, args.accumulate, "micro-batches")
    choose_defaults(args, device, local_world_size)  # for --precision, --workers
    train_set, val_set = build_datasets(args)

    # [2/6 shard] the single process takes every image
    train_share = DistributedSampler(
        train_set, num_replicas=world_size, rank=rank, seed=args.seed, drop_last=True
    )
    val_share = range(len(val_set))
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

    # [3/6 wrap] a forward pass through `model` also splits the batch across the GPUs
    model = nn.DataParallel(raw_model) if gpus > 1 else raw_model
    eval_model = model  # it also splits validation batches
    to_save = {"state_dict": raw_model}  # the weights in checkpoints
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

    # [6/6 finish] nothing to shut down: there is no other process
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
            # [4/6 step] backward() adds up the replicas' gradients on the first GPU
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


# [5/6 combine] the single process already has all sums and buffers
def all_reduce(sums: Tensor) -> Tensor:
    """Sum a tensor over all processes."""
    return sums


def broadcast_buffers(model: nn.Module) -> None:
    """Copy rank 0's batch norm statistics to all processes (rank 0 saves them)."""


# [/combine]


# [start]
def arguments() -> Namespace:
    """Parse the command line."""
    return parse_arguments(build_parser(__doc__))


if __name__ == "__main__":
    with one_line_errors():
        main(arguments())
# [/start]
