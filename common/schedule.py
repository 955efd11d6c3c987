"""The learning rate as a function of the step."""

import argparse
import math
import warnings

import torch
from torch.optim.lr_scheduler import LambdaLR


def build_scheduler(
    args: argparse.Namespace, optimizer: torch.optim.Optimizer, steps_per_epoch: int
) -> LambdaLR:
    """Build the scheduler; call its step() after every optimizer step.

    The learning rate rises linearly in --warmup-epochs (Goyal et al., section 2.2).
    Then it falls by a factor of 10 every 30 epochs of the run (--schedule step), or
    follows half a cosine down to 0.
    """
    steps_per_epoch = max(1, steps_per_epoch)
    warmup_epochs = args.warmup_epochs

    def factor(step: int) -> float:
        epoch = (step + 1) / steps_per_epoch
        if epoch < warmup_epochs:
            return epoch / warmup_epochs
        if args.schedule == "cosine":
            length = max(args.epochs - warmup_epochs, 1e-9)
            progress = (step / steps_per_epoch - warmup_epochs) / length
            return 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
        return 0.1 ** (step // steps_per_epoch // 30)

    # The scaler skips fp16 steps that overflow; the scheduler would warn about them
    message = r"Detected call of `lr_scheduler\.step\(\)` before"
    warnings.filterwarnings("ignore", message)
    return LambdaLR(optimizer, factor)
