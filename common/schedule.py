"""The learning rate as a function of the step."""

import argparse
import math
import warnings

import torch
from torch.optim.lr_scheduler import LambdaLR


def learning_rate_factor(
    step: int, steps_per_epoch: int, epochs: int, warmup_epochs: float, schedule: str
) -> float:
    """The multiplier for the learning rate at a step, counted from the run's start.

    It rises linearly to 1 in `warmup_epochs` (Goyal et al., section 2.2). Then it falls
    by a factor of 10 every 30 epochs of the run ("step"), or follows half a cosine down
    to 0 ("cosine").
    """
    epoch = (step + 1) / steps_per_epoch
    if epoch < warmup_epochs:
        return epoch / warmup_epochs
    if schedule == "cosine":
        progress = (step / steps_per_epoch - warmup_epochs) / max(
            epochs - warmup_epochs, 1e-9
        )
        return 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
    return 0.1 ** (step // steps_per_epoch // 30)


def build_scheduler(
    args: argparse.Namespace, optimizer: torch.optim.Optimizer, steps_per_epoch: int
) -> LambdaLR:
    """Build the scheduler; call its step() after every optimizer step."""
    # The scaler skips fp16 steps that overflow; the scheduler would warn about them
    warnings.filterwarnings(
        "ignore", r"Detected call of `lr_scheduler\.step\(\)` before"
    )
    return LambdaLR(
        optimizer,
        lambda step: learning_rate_factor(
            step,
            max(1, steps_per_epoch),
            args.epochs,
            args.warmup_epochs,
            args.schedule,
        ),
    )
