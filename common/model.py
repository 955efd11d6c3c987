"""The model (any torchvision classifier), its device and its learning rate."""

import ctypes
import math
import multiprocessing
import os
import signal
import warnings
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torchvision import models

from common.errors import UserError

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_model(args: Namespace, classes: Sequence[str], rank: int) -> nn.Module:
    """Build `args.arch`, which maps (B, 3, S, S) images to (B, len(classes)) outputs.

    The initial weights depend only on the seed, so they are the same in all processes.
    --pretrained then copies torchvision's weights where they fit; rank 0 prints which
    do not fit. With --compile, the first batch compiles the model. Raises UserError if
    torchvision lacks this model or its weights, or if --evaluate's weights do not fit.
    """
    options: dict = {"num_classes": len(classes)}
    if args.arch.startswith("vit_"):
        options["image_size"] = args.image_size
    if args.arch in ("googlenet", "inception_v3"):  # one output instead of several
        options |= {"aux_logits": False, "transform_input": args.pretrained}
    torch.manual_seed(args.seed)
    try:
        model = models.get_model(args.arch, **options)
        if args.compile:
            model.compile()
        if not args.pretrained:
            return model
        found = models.get_model(args.arch, weights="DEFAULT").state_dict()
    except (OSError, ValueError, AssertionError) as error:
        raise UserError(f"--arch {args.arch}: {error}") from None
    state = model.state_dict()
    fits = {n: w for n, w in found.items() if n in state and w.shape == state[n].shape}
    model.load_state_dict(state | fits)
    if new := ", ".join(name for name in state if name not in fits):
        message = f"--pretrained: {new} do not fit these classes or this --image-size"
        if args.evaluate:
            raise UserError(message)
        if rank == 0:
            print(f"{message} and start from random values", flush=True)
    return model


def best_precision(device: torch.device) -> str:
    """Return bf16 if the device supports it natively, otherwise fp32."""
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = "bf16" in Path("/proc/cpuinfo").read_text()  # one of the CPU flags
    return "bf16" if native else "fp32"


def die_with_parent() -> None:
    """Make Linux kill this process when its parent ends; exit if it already ended."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    parent = multiprocessing.parent_process()  # None if a launcher started this process
    if parent and parent.pid != os.getppid():
        os._exit(1)


def set_up_cuda(processes: int) -> None:
    """Choose fast convolutions, and TF32 for fp32 matrix products, as in cuDNN.

    Raises UserError if this machine has GPUs, but fewer GPUs than processes.
    """
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    if 0 < (gpus := torch.cuda.device_count()) < processes:
        raise UserError(
            f"{processes} processes on this machine, but it has {gpus} visible GPU(s): "
            "start one per GPU; with Slurm, use --gpus-per-node, not --gpus-per-task"
        )


def build_scheduler(
    args: Namespace, optimizer: torch.optim.Optimizer, steps_per_epoch: int
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

    if args.precision == "fp16":  # the scaler may skip the first steps
        message = r"Detected call of `lr_scheduler\.step\(\)` before"
        warnings.filterwarnings("ignore", message)
    return LambdaLR(optimizer, factor)
