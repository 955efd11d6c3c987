"""The model (any torchvision classifier), its precision and its learning rate."""

import argparse
import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torchvision.models import get_model

from common.errors import UserError

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_model(args: argparse.Namespace, classes: Sequence[str]) -> nn.Module:
    """Build `args.arch`, which maps (B, 3, S, S) images to (B, len(classes)) outputs.

    The initial weights are torchvision's (--pretrained) or depend only on the seed, so
    that they are the same in every process. Raises UserError if torchvision has no such
    model, or no such weights for these classes and this image size.
    """
    options: dict = {"num_classes": len(classes)}
    if args.arch.startswith("vit_"):
        options["image_size"] = args.image_size
    torch.manual_seed(args.seed)
    try:
        weights = "DEFAULT" if args.pretrained else None
        model = get_model(args.arch, weights=weights, **options)
    except (OSError, ValueError, AssertionError) as error:
        raise UserError(f"--arch {args.arch}: {error}") from None
    if args.arch in ("googlenet", "inception_v3"):  # one output instead of several
        model.aux_logits = False
        model.AuxLogits = model.aux1 = model.aux2 = None
    return model


def best_precision(device: torch.device) -> str:
    """Return bf16 if the device supports it natively, otherwise fp32."""
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = "bf16" in Path("/proc/cpuinfo").read_text()  # one of the CPU flags
    return "bf16" if native else "fp32"


def build_scheduler(
    args: argparse.Namespace, optimizer: torch.optim.Optimizer, steps_per_epoch: int
) -> LambdaLR:
    """Build the learning-rate scheduler; call its step() after each optimizer step.

    The rate rises linearly during --warmup-epochs, then falls by a factor of 10 every
    30 epochs of the run (--schedule step), or follows half a cosine down to 0.

    Source of the warm-up: Goyal et al. 2017, https://arxiv.org/abs/1706.02677
    """
    steps_per_epoch = max(1, steps_per_epoch)

    def factor(step: int) -> float:
        epoch = (step + 1) / steps_per_epoch
        if epoch < args.warmup_epochs:
            return epoch / args.warmup_epochs
        if args.schedule == "cosine":
            length = max(args.epochs - args.warmup_epochs, 1e-9)
            progress = (step / steps_per_epoch - args.warmup_epochs) / length
            return 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
        return 0.1 ** (step // steps_per_epoch // 30)

    # The scaler skips fp16 steps that overflow; the scheduler would warn about them
    message = r"Detected call of `lr_scheduler\.step\(\)` before"
    warnings.filterwarnings("ignore", message)
    return LambdaLR(optimizer, factor)
