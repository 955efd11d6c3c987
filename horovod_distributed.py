"""Train an ImageNet classifier with Horovod, one process per GPU.

horovodrun or mpirun starts the processes. hvd.DistributedOptimizer averages the
gradients over NCCL, MPI or Gloo while the backward pass is still running.

    horovodrun --gloo -np 4 python horovod_distributed.py --data /path/to/imagenet
    mpirun -np 4 --bind-to none python horovod_distributed.py --data /path/to/imagenet

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

try:
    import horovod.torch as hvd
except ImportError as error:
    hvd, problem = None, error
# [/imports]


def main(args: Namespace) -> None:
    """Train and validate; every process runs this function."""
    # [1/6 launch] Horovod gets this process's rank from horovodrun or MPI
    hvd.init()
    rank, local_rank, world_size = hvd.rank(), hvd.local_rank(), hvd.size()
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    else:
        device = torch.device("cpu")
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

    # [3/6 wrap] the optimizer's hooks average gradients during backward()
    compression = getattr(hvd.Compression, args.compress_gradients or "none")
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        raw_model.named_parameters(),
        in_contiguous_format(compression),
        backward_passes_per_step=args.accumulate,
    )
    raw_model.to(memory_format=torch.contiguous_format)  # Horovod sends no other format
    hvd.broadcast_parameters(raw_model.state_dict(), root_rank=0)
    raw_model.to(memory_format=torch.channels_last)
    # hvd.broadcast_optimizer_state() is for state that only rank 0 has. Here, all ranks
    # load the checkpoint. With a new SGD optimizer, the call also takes a hidden step.
    model = eval_model = raw_model
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

    # [6/6 finish] wait for rank 0, which may still be saving
    hvd.barrier()
    hvd.shutdown()
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
            # [4/6 step] Horovod averages in the last backward(); synchronize() waits
            outputs = forward(args, model, x)
            loss = F.cross_entropy(outputs, y, label_smoothing=args.label_smoothing)
            scaler.scale(loss / args.accumulate).backward()
            if last:
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)  # all ranks skip the step on overflow
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
    return hvd.allreduce(sums, op=hvd.Sum, name="sums")  # a new tensor


def broadcast_buffers(model: nn.Module) -> None:
    """Copy rank 0's batch norm statistics to all processes (rank 0 saves them)."""
    hvd.broadcast_parameters(dict(model.named_buffers()), root_rank=0)


# [/combine]


# [start]
def in_contiguous_format(compressor: type) -> type:
    """Return a compressor that makes gradients contiguous, as Horovod requires.

    Source: https://horovod.readthedocs.io/en/stable/api.html#horovod.torch.Compressor
    """

    class Contiguous(compressor):
        @staticmethod
        def compress(tensor: Tensor) -> tuple:
            return compressor.compress(tensor.contiguous())

    return Contiguous


def arguments() -> Namespace:
    """Parse the command line and check that Horovod is installed."""
    parser = build_parser(__doc__)
    add = parser.add_argument
    add("--compress-gradients", choices=("fp16",), help="dtype for averaging")
    args = parse_arguments(parser)
    if hvd is None:
        raise UserError(f"no Horovod ({problem}): bash scripts/install_horovod.sh")
    if torch.cuda.is_available() and not hvd.nccl_built():
        raise UserError("this Horovod lacks NCCL: see docs/running.md")
    return args


if __name__ == "__main__":
    with one_line_errors():
        main(arguments())
# [/start]
