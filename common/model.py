"""The network: any classification model of torchvision, a ResNet-18 by default."""

import argparse
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from common.errors import UserError


def architectures() -> list[str]:
    """Names of torchvision's classification models."""
    return torchvision.models.list_models(module=torchvision.models)


def build_model(args: argparse.Namespace, classes: int) -> nn.Module:
    """Build `args.arch`: (B, 3, S, S) images in, (B, classes) outputs.

    Its first weights depend on the seed alone, so they are the same in every process.

    Raises:
        UserError: the pretrained weights are for another number of classes or cannot be
            had, or the model cannot take images of this size.
    """
    options = {}
    if args.arch in ("googlenet", "inception_v3") and not args.pretrained:
        options = {"aux_logits": False, "init_weights": True}  # one output in training
    if args.arch.startswith("vit_") and not args.pretrained:
        options["image_size"] = args.image_size
    weights = "DEFAULT" if args.pretrained else None
    if args.pretrained:
        known = len(
            torchvision.models.get_model_weights(args.arch).DEFAULT.meta["categories"]
        )
        if known != classes:
            raise UserError(
                f"--pretrained: the weights of {args.arch} are for {known} classes, "
                f"the data has {classes}"
            )
    torch.manual_seed(args.seed)
    try:
        model = torchvision.models.get_model(
            args.arch, weights=weights, num_classes=classes, **options
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"--pretrained: cannot have the weights of {args.arch}: {error}"
        ) from None
    if args.pretrained and args.arch == "inception_v3":
        model.aux_logits, model.AuxLogits = False, None
    if not args.no_channels_last:
        model.to(memory_format=torch.channels_last)
    if args.compile:
        model.compile()
    return model


class AutocastModel(nn.Module):
    """A model that enters autocast in its own forward.

    nn.DataParallel runs its replicas in threads, and autocast's dtype is per thread:
    with autocast around it only, bf16 on two GPUs would silently compute in fp16
    (torch/nn/parallel/parallel_apply.py hands on that autocast is on, not its dtype).
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.module = module
        self.dtype = dtype

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, S, S) images -> (B, classes) outputs in `dtype`."""
        enabled = self.dtype != torch.float32
        with torch.autocast(images.device.type, self.dtype, enabled=enabled):
            return self.module(images)


def contiguous_view(tensor: Tensor) -> Tensor:
    """The same memory as a contiguous tensor: channels_last as (O, H, W, I).

    For libraries that take contiguous tensors only. A tensor of another kind comes back
    as it is.
    """
    if tensor.dim() == 4 and not tensor.is_contiguous():
        return tensor.permute(0, 2, 3, 1)
    return tensor


class InMemoryOrder:
    """Puts contiguous views of gradients through a compressor, and gradients out of it.

    The compressor has `compress(tensor) -> (tensor, context)` and its reverse,
    `decompress`, as Horovod's have
    (https://horovod.readthedocs.io/en/stable/api.html#horovod.torch.Compressor).
    """

    def __init__(self, compressor: Any):
        self.compressor = compressor

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Compress a gradient of any memory format."""
        view = contiguous_view(tensor)
        compressed, context = self.compressor.compress(view)
        return compressed, (context, view is not tensor)

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        """Undo `compress`, memory format included."""
        inner, permuted = context
        tensor = self.compressor.decompress(tensor, inner)
        return tensor.permute(0, 3, 1, 2) if permuted else tensor


def check_image_size(args: argparse.Namespace, classes: int) -> None:
    """Send two images without content through the model.

    Raises:
        UserError: `args.arch` cannot take images of `args.image_size`.
    """
    fresh = argparse.Namespace(**{**vars(args), "pretrained": False, "compile": False})
    try:
        with torch.device("meta"):
            images = torch.empty(2, 3, args.image_size, args.image_size)
            build_model(fresh, classes).train()(images)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise UserError(
            f"{args.arch} cannot train on images of --image-size {args.image_size}: "
            f"{error}"
        ) from None
