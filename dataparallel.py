"""Train an ImageNet classifier with nn.DataParallel: one process, all GPUs.

Every step copies the model to all GPUs, scatters the batch across them and gathers the
outputs on the first GPU. The script needs no launcher.

    python dataparallel.py --data /path/to/imagenet
    CUDA_VISIBLE_DEVICES=0,1 python dataparallel.py --data /path/to/imagenet

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
from common.errors import UserError
# [/imports]


def main(args: Namespace) -> None:
    """Train and validate; every process runs this function."""
    # [1/6 launch] one process uses all GPUs
    rank, world_size = 0, 1
    gpus = torch.cuda.device_count()
    device = torch.device("cuda" if gpus else "cpu")
    # nn.DataParallel starts new threads in each step. With cudnn.benchmark, cuDNN
    # searches again in each thread (https://github.com/pytorch/pytorch/issues/104701)
    torch.backends.cudnn.benchmark = gpus == 1
    if gpus > 1 and args.precision == "bf16":
        raise UserError("--precision bf16: nn.DataParallel's threads would use fp16")
    if gpus > 1 and args.compile:
        raise UserError("--compile: nn.DataParallel's replicas cannot be compiled")
    if gpus > 1:
        args.precision = args.precision or "fp32"
    # [/launch]

    args.precision = args.precision or best_precision(device)
    train_set, val_set = build_datasets(args)

    # [2/6 shard] the single process takes every image
    train_sampler = DistributedSampler(
        train_set, num_replicas=world_size, rank=rank, seed=args.seed, drop_last=True
    )
    val_sampler = range(len(val_set))
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

    # [3/6 wrap] a forward pass through `model` also splits the batch across the GPUs
    model = nn.DataParallel(raw_model) if gpus > 1 else raw_model
    eval_model = model  # it also splits validation batches
    saved = {"state_dict": raw_model}  # what checkpoints hold; more follows below
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
