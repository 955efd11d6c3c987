"""Checks before training that all processes of a run have the same settings."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from common.checkpoint import open_checkpoint
from common.data import digest_of, fingerprint
from common.errors import UserError, speaks_for_machine

# Flags that may differ between processes; agree() compares the contents of folders
MAY_DIFFER = {
    *("local_rank", "node_rank", "dist_url", "timeout"),
    *("data", "output", "resume", "workers"),
}


def agree(
    args: argparse.Namespace,
    rank: int,
    world_size: int,
    device: torch.device,
    all_reduce: Callable[[Tensor], Tensor],
    datasets: tuple[Dataset, Dataset],
) -> tuple[Path, dict] | None:
    """Check that all processes have the same settings; otherwise they could hang.

    Each process writes digests of its settings into its row of a table of zeros; the
    sum over all processes is the complete table. Call this after build_loader():
    a process that communicates should not fork loader processes. Returns the checkpoint
    to resume from, or None for a fresh start. Raises UserError if a setting differs, or
    if the batch or the validation images cannot be divided among the processes.
    """
    check_batch(args, world_size)
    train_set, val_set = datasets
    if len(val_set) < world_size:
        raise UserError(
            f"{len(val_set)} validation images are too few for {world_size} processes; "
            "each one needs an image"
        )
    facts = {
        "--" + name.replace("_", "-"): value
        for name, value in vars(args).items()
        if name not in MAY_DIFFER
    }
    facts["--decoder"] = args.decoder == "pil"  # other decoders give the same pixels
    facts["--device"] = device.type
    facts["PyTorch's version"] = torch.__version__.split("+")[0]
    facts["the training images"] = fingerprint(train_set)
    facts["the validation images"] = fingerprint(val_set)
    checkpoint = open_checkpoint(args)
    # Sums and timings identify one moment of one run; hashing weights would be slow
    moment = ("epoch", "step", "sums", "records") if checkpoint else ()
    facts["the checkpoint"] = [checkpoint[1][name] for name in moment]
    table = torch.zeros(world_size, len(facts), dtype=torch.float64)
    digests = [digest_of(repr(fact).encode()) for fact in facts.values()]
    table[rank] = torch.tensor(digests, dtype=torch.float64)
    table = all_reduce(table.to(device)).cpu()
    different = (table != table[0]).nonzero().tolist()
    if different:
        other = different[0][0]
        names = [list(facts)[column] for row, column in different if row == other]
        if not speaks_for_machine():
            time.sleep(1)  # a launcher ends all processes when the first one exits
        raise UserError(
            f"rank {other} differs from rank 0 in {', '.join(names[:3])}; all "
            "processes need the same settings"
        )
    return checkpoint


def check_batch(args: argparse.Namespace, world_size: int) -> None:
    """Raise a UserError if the processes cannot divide the global batch evenly."""
    batch, parts = args.global_batch_size, world_size * args.accumulate
    if batch % parts:
        each = "" if args.accumulate == 1 else f" with {args.accumulate} micro-batches"
        raise UserError(
            f"--global-batch-size {batch} cannot be divided evenly among {world_size} "
            f"processes{each}; the nearest size that can is "
            f"{max(1, round(batch / parts)) * parts}"
        )
