"""Train an ImageNet classifier with nn.DataParallel: one process, all GPUs.

Every step copies the model to all GPUs, scatters the batch over them and gathers the
outputs on the first one. It needs no launcher; without a GPU it is one plain process.

    python dataparallel.py --data /path/to/imagenet
    CUDA_VISIBLE_DEVICES=0,1 python dataparallel.py --data /path/to/imagenet
    bash scripts/dataparallel.sh --data /path/to/imagenet

What stands between `# [name]` and `# [/name]` is this strategy; the other lines are the
same in all five scripts.
"""

from argparse import Namespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data.distributed import DistributedSampler

from launch.agreement import agree
from common.arguments import build_parser, parse_arguments
from common.checkpoint import TrainingState, resume
from common.data import DeviceLoader, build_datasets, build_loader, share_out
from common.device import autocast_dtype, best_precision, select_device
from common.errors import Stopped, exit_status
from common.launch import Watchdog
from common.meters import Averages, Meter, averages
from common.model import build_model
from common.progress import Progress
from common.report import print_epoch, print_start, print_validation, write_report
from common.schedule import build_scheduler, scaled_learning_rate
from common.seeding import seed_step

# [imports]
from common.errors import UserError
from common.model import AutocastModel
# [/imports]


def main(args: Namespace) -> None:
    """Train and validate; every process runs this function."""
    # [1/6 launch] there is one process, whatever the number of GPUs
    rank, local_rank, world_size, local_world_size = 0, 0, 1, 1
    device = select_device(args.device)
    # [/launch]

    args.precision = args.precision or best_precision(device)
    share_out(args, local_rank, world_size, local_world_size)
    train_set, val_set = build_datasets(args)

    # [2/6 shard] one process takes every image
    train_sampler = DistributedSampler(
        train_set, num_replicas=world_size, rank=rank, seed=args.seed, drop_last=True
    )
    val_sampler = range(rank, len(val_set), world_size)
    # [/shard]

    train_loader = build_loader(args, train_set, train_sampler, device, training=True)
    val_loader = build_loader(args, val_set, val_sampler, device, training=False)
    everyone = agree(args, rank, device, combine, train_set, val_set)

    raw_model = build_model(args, len(train_set.classes)).to(device)
    optimizer = torch.optim.SGD(
        raw_model.parameters(),
        lr=scaled_learning_rate(args.lr, args.global_batch_size),
        momentum=args.momentum,
        weight_decay=args.weight_decay,
    )
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")

    # [3/6 wrap] a forward pass through `model` also divides the batch over the GPUs
    gpus = list(range(torch.cuda.device_count())) if device.type == "cuda" else []
    if args.compile and len(gpus) > 1:
        raise UserError("--compile: nn.DataParallel's replicas cannot be compiled")
    model = AutocastModel(raw_model, autocast_dtype(args.precision))
    if gpus:
        model = nn.DataParallel(model, device_ids=gpus, output_device=gpus[0])
    eval_model = model
    extra_state = {}
    # [/wrap]

    scheduler = build_scheduler(args, optimizer, len(train_loader))
    state = TrainingState(args, raw_model, optimizer, scheduler, scaler, **extra_state)
    resume(args, state, everyone)
    if rank == 0:
        print_start(args, state, device, world_size, len(train_loader))

    if args.evaluate:
        val = validate(args, val_loader, eval_model, Meter(device))
        if rank == 0:
            print_validation(val)

    meter, progress = Meter(device, Watchdog(args.timeout)), Progress(args, rank)
    while state.epoch < args.epochs and not args.evaluate and not state.stop_requested:
        train_sampler.set_epoch(state.epoch)
        train(args, rank, train_loader, model, state, meter, progress)
        if not state.stop_requested:
            val = validate(args, val_loader, eval_model, meter)
            record = state.finish_epoch(val, progress.figures(device))
            if rank == 0:
                print_epoch(record, args.epochs)
        if rank == 0:
            write_report(args, state, device, world_size)
            state.save()

    # [6/6 finish] nothing to take down: there is no other process
    # [/finish]
    if state.stop_requested:
        raise Stopped(state.position)


def train(
    args: Namespace,
    rank: int,
    loader: DeviceLoader,
    model: nn.Module,
    state: TrainingState,
    meter: Meter,
    progress: Progress,
) -> None:
    """Train one epoch, or the rest of it, and leave its sums in `state`."""
    model.train()
    loader.first_step = state.step
    progress.start(state.epoch, state.step, len(loader))
    for step, (images, labels) in enumerate(loader, start=state.step + 1):
        seed_step(args.seed, state.epoch, step, rank)
        loss, outputs = train_step(args, model, state, images, labels)
        state.scheduler.step()
        meter.add(loss, outputs, labels)
        # Between these moments metrics wait neither for the device nor for a process
        save = step % args.checkpoint_steps == 0 and step < len(loader)
        if save or step == len(loader) or step % args.print_interval == 0:
            recent = state.add(step, combine(meter.take()))
            progress.lap(step, recent, loader.wait_seconds())
            if state.stop_requested:
                break  # main() saves, as it does after the last step
            if save and rank == 0:
                state.save()
    progress.close()


def train_step(
    args: Namespace,
    model: nn.Module,
    state: TrainingState,
    images: Tensor,
    labels: Tensor,
) -> tuple[Tensor, Tensor]:
    """One optimizer step; returns this process's mean loss and its outputs."""
    outputs = forward(args, model, images)
    loss = F.cross_entropy(outputs, labels, label_smoothing=args.label_smoothing)
    state.optimizer.zero_grad()
    # [4/6 step] backward() adds the replicas' gradients up on the first GPU
    state.scaler.scale(loss).backward()
    state.scaler.step(state.optimizer)
    state.scaler.update()
    # [/step]
    return loss, outputs


def forward(args: Namespace, model: nn.Module, images: Tensor) -> Tensor:
    """(B, 3, S, S) normalised images -> (B, classes) float32 outputs."""
    dtype = autocast_dtype(args.precision)
    with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
        return model(images).float()


@torch.no_grad()
def validate(
    args: Namespace, loader: DeviceLoader, eval_model: nn.Module, meter: Meter
) -> Averages:
    """Loss and accuracy over all validation images, the same in every process."""
    share_buffers(eval_model)
    eval_model.eval()
    for images, labels in loader:
        outputs = forward(args, eval_model, images)
        meter.add(F.cross_entropy(outputs, labels), outputs, labels)
    return averages(combine(meter.take()))


# [5/6 combine] one process has all sums and buffers already
def combine(sums: Tensor) -> Tensor:
    """Add up a tensor over all processes."""
    return sums


def share_buffers(model: nn.Module) -> None:
    """Take over rank 0's batch norm statistics: they are what it saves."""


# [/combine]


# [start]
def arguments(argv: list[str] | None = None) -> Namespace:
    """Parse the command line."""
    return parse_arguments(build_parser(__doc__), "dataparallel", argv)


if __name__ == "__main__":
    with exit_status():
        main(arguments())
# [/start]
