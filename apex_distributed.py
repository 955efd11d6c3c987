"""Train an ImageNet classifier with NVIDIA Apex: amp mixed precision and Apex's DDP.

amp.initialize prepares the model and the optimizer for --opt-level: O0 trains in fp32,
O1 casts the inputs of operations, and O2 casts the model but keeps fp32 master weights.
Apex's DDP averages gradients. Amp and DDP need GPUs; tag 25.05 is the last with both.

    torchrun --standalone --nproc-per-node=4 apex_distributed.py --data DIR

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

import torch.distributed as dist

from common.model import die_with_parent, set_up_cuda

try:
    from apex import amp
    from apex.parallel import DistributedDataParallel as ApexDDP
except ImportError as error:
    amp, problem = None, error
# [/imports]


def main(args: Namespace) -> None:
    """Train and validate; every process runs this function."""
    # [1/6 launch] the launcher has set these environment variables
    if "RANK" not in os.environ:
        raise UserError("RANK is not set: use torchrun --standalone --nproc-per-node=2")
    if "TORCHELASTIC_RUN_ID" in os.environ:  # set by torchrun
        die_with_parent()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
    set_up_cuda(local_world_size)
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
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

    # [3/6 wrap] amp first, then Apex's DDP, whose backward pass averages gradients
    raw_model.to(memory_format=torch.contiguous_format)  # Apex's DDP ignores strides
    if args.sync_bn:  # Apex's converter would replace weights that `optimizer` holds
        raw_model = nn.SyncBatchNorm.convert_sync_batchnorm(raw_model)
    raw_model, optimizer = amp.initialize(
        raw_model, optimizer, opt_level=args.opt_level
    )
    model = ApexDDP(raw_model)
    eval_model = raw_model  # amp also casts during validation
    to_save = {"state_dict": raw_model, "amp": amp}  # entries of checkpoints
    if args.opt_level == "O2":
        optimizer.zero_grad()  # creates the fp32 master weights, which load() fills
        to_save["masters"] = nn.ParameterList(amp.master_params(optimizer))
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
            # [4/6 step] amp scales the loss; Apex's DDP averages in the last backward()
            if last:
                model.enable_allreduce()
            else:
                model.disable_allreduce()
            outputs = forward(args, model, x)
            loss = F.cross_entropy(outputs, y, label_smoothing=args.label_smoothing)
            part = loss / args.accumulate
            with amp.scale_loss(part, optimizer, delay_unscale=not last) as scaled_loss:
                scaled_loss.backward()
            if last:
                optimizer.step()
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
    """Parse the command line and check that Apex can run."""
    parser = build_parser(__doc__)
    add = parser.add_argument
    add("--sync-bn", action="store_true", help="synchronize batch norm over all GPUs")
    add("--opt-level", choices=("O0", "O1", "O2", "O3"), default="O1", help="(O1)")
    add("--local-rank", help="set by older launchers; unused")
    args = parse_arguments(parser)
    if args.precision or args.compile:
        raise UserError("Apex's amp has --opt-level, but no --precision or --compile")
    args.precision = "fp32"  # turns torch.autocast off, because amp casts
    if not torch.cuda.is_available():
        raise UserError("Apex needs a CUDA GPU, and PyTorch finds none")
    if amp is None:
        install = "pip install --no-build-isolation git+https://github.com/NVIDIA/apex"
        raise UserError(f"Apex's amp or DDP is missing ({problem}): {install}@25.05")
    return args


if __name__ == "__main__":
    with one_line_errors():
        main(arguments())
# [/start]
