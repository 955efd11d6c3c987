"""What a run prints, and report.json beside its checkpoints."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import torch
import torchvision

from common.checkpoint import TrainingState, replace_file
from common.device import describe
from common.meters import Averages
from common.model import validation_protocol
from common.schedule import scaled_learning_rate

SMALL_BATCH = 16  # batch norm errs more below it: https://arxiv.org/abs/1803.08494

VALIDATION = (
    "val loss {loss:.4f}, top-1 {top1:.2f} %, top-5 {top5:.2f} %, {images} images"
)


def processes(number: int) -> str:
    """Say a number of processes."""
    return f"{number} process{'' if number == 1 else 'es'}"


def print_start(
    args: argparse.Namespace,
    state: TrainingState,
    device: torch.device,
    world_size: int,
    steps_per_epoch: int,
) -> None:
    """Say what is about to run, and from where it goes on."""
    lr = scaled_learning_rate(args.lr, args.global_batch_size)
    data = "synthetic images"
    if not args.synthetic:
        data = f"{args.workers} loader processes ({args.decoder})"
    print(
        f"{args.strategy}: {processes(world_size)} on {describe(device)} "
        f"({device.type}), {args.arch}, {args.precision}, seed {args.seed}\n"
        f"{steps_per_epoch} steps an epoch of {args.global_batch_size} images, "
        f"{args.per_process_batch_size} per process, {data}, "
        f"learning rate {lr:.4g}",
        flush=True,
    )
    if args.pretrained and not args.synthetic:
        crop, resized, interpolation = validation_protocol(args)
        print(
            f"pretrained weights; validation resizes the shorter side to {resized} "
            f"({interpolation.value}) and takes the middle {crop} pixels",
            flush=True,
        )
    size, one, fewer = args.per_process_batch_size, "process", "start fewer processes"
    if args.strategy == "dataparallel" and device.type == "cuda":
        size, one, fewer = size // torch.cuda.device_count(), "GPU", "use fewer GPUs"
    if size < SMALL_BATCH and not args.evaluate:
        print(
            f"note: {size} images per {one} and step are few: below {SMALL_BATCH}, "
            "batch norm costs accuracy and GPUs idle; raise --global-batch-size, or "
            f"{fewer}",
            flush=True,
        )
    if state.epoch >= args.epochs and not args.evaluate:
        print(f"complete already: {state.epoch} of {args.epochs} epochs", flush=True)
    elif (state.epoch or state.step) and not args.evaluate:
        print(
            f"resumed at epoch {state.epoch + 1}, after step {state.step} of it "
            f"(image {state.step * args.global_batch_size} of its order), "
            f"saved by {processes(state.saved_by)}",
            flush=True,
        )


def print_epoch(record: dict, epochs: int) -> None:
    """Print the record of a finished epoch in one line."""
    speed = record["images_per_second"]
    val = {name: record[f"val_{name}"] for name in ("loss", "top1", "top5", "images")}
    print(
        f"epoch {record['epoch'] + 1}/{epochs}: train loss {record['train_loss']:.4f}, "
        f"top-1 {record['train_top1']:.2f} %; {VALIDATION.format(**val)}; "
        f"{record['seconds']:.1f} s"
        + (f" from step {record['first_step']} on" if record["first_step"] else "")
        + (
            f", {speed:.0f} images/s, waited for data {record['data_wait_share']:.0%}"
            if speed
            else " (warm-up)"
        ),
        flush=True,
    )


def print_validation(val: Averages) -> None:
    """Print what --evaluate found."""
    print(VALIDATION.format(**val._asdict()), flush=True)


def write_report(
    args: argparse.Namespace,
    state: TrainingState,
    device: torch.device,
    world_size: int,
) -> None:
    """Write report.json: how the run was made, on what, and its figures."""
    report = {
        "strategy": args.strategy,
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": commit(),
        "world_size": world_size,
        "device": device.type,
        "device_name": describe(device),
        "cpu_cores": os.cpu_count(),
        "threads_per_process": torch.get_num_threads(),
        "precision": args.precision,
        "arch": args.arch,
        "global_batch_size": args.global_batch_size,
        "workers": args.workers,
        "decoder": None if args.synthetic else args.decoder,
        "seed": args.seed,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        **summarise(state.records),
    }
    text = json.dumps(report, indent=2, default=str) + "\n"
    replace_file(
        Path(args.output, "report.json"), lambda file: file.write(text.encode())
    )


def commit() -> str | None:
    """The project's commit, -dirty where files differ from it; None outside git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        here = Path(__file__).parent
        found = subprocess.run(command, cwd=here, capture_output=True, text=True)
    except OSError:
        return None
    return found.stdout.strip() or None


def summarise(records: list[dict]) -> dict:
    """Medians over epochs, but for the first one and those resumed in the middle.

    The first one pays for start-up and warm-up.
    """
    later = [one for one in records[1:] if not one.get("first_step")] or records
    measured = ("seconds", "images_per_second", "step_milliseconds", "data_wait_share")
    summary: dict = {"epochs": len(records)}
    for name in measured:
        values = [record[name] for record in later if record[name] is not None]
        summary[name] = statistics.median(values) if values else None
    summary["val_top1"] = records[-1]["val_top1"] if records else None
    summary["best_val_top1"] = max(
        (record["val_top1"] for record in records), default=None
    )
    return summary
