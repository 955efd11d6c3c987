"""The model: any torchvision classification model, by default a ResNet-18."""

import argparse
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision.models import get_model, get_model_weights
from torchvision.transforms.v2 import InterpolationMode

from common.errors import UserError


def architectures() -> list[str]:
    """Names of torchvision's classification models."""
    return torchvision.models.list_models(module=torchvision.models)


def build_model(args: argparse.Namespace, dataset: Dataset) -> nn.Module:
    """Build `args.arch`: (B, 3, S, S) images in, (B, classes) outputs.

    Its initial weights are torchvision's (--pretrained), or depend only on the seed, so
    they are the same in every process. Raises UserError if the dataset has no
    `classes`, or if the weights do not fit or cannot be loaded.
    """
    if not hasattr(dataset, "classes"):
        raise UserError(
            f"{type(dataset).__name__} has no `classes`, a list with one class name "
            "for each output of the model"
        )
    options: dict = {"num_classes": len(dataset.classes)}
    if args.arch.startswith("vit_"):
        options["image_size"] = args.image_size
    if args.arch.startswith("maxvit"):
        options["input_size"] = (args.image_size, args.image_size)
    if args.arch in ("googlenet", "inception_v3") and not args.pretrained:
        options |= {"aux_logits": False, "init_weights": True}
    weights = get_model_weights(args.arch).DEFAULT if args.pretrained else None
    torch.manual_seed(args.seed)
    try:
        model = get_model(args.arch, weights=weights, **options)
    except (OSError, ValueError, AssertionError) as error:
        flags = f"--arch {args.arch} --image-size {args.image_size}"
        flags += " --pretrained" * args.pretrained
        raise UserError(f"{flags}: {error}") from None
    if args.arch == "inception_v3":  # no auxiliary outputs
        model.aux_logits, model.AuxLogits = False, None
    return model


def validation_protocol(args: argparse.Namespace) -> tuple[int, int, InterpolationMode]:
    """Return (crop size, shorter side before cropping, interpolation) for validation.

    Sizes are in pixels. Pretrained weights at their own size use torchvision's values.
    Otherwise, the shorter side is 8/7 of the crop size, as in the ResNet paper.

    Source: https://docs.pytorch.org/vision/stable/models.html#using-the-pre-trained-models
    """
    size = args.image_size
    if args.pretrained:
        preset = get_model_weights(args.arch).DEFAULT.transforms()
        if preset.crop_size == [size]:
            return size, preset.resize_size[0], preset.interpolation
    return size, size * 256 // 224, InterpolationMode.BILINEAR


def pretrained_normalization(arch: str) -> Tensor:
    """The mean and standard deviation that torchvision's weights expect: (2, 3, 1, 1).

    Pixels are from 0 to 255. All models except efficientnet_v2_l use ImageNet's values.
    """
    preset = get_model_weights(arch).DEFAULT.transforms()
    values = torch.tensor([preset.mean, preset.std], dtype=torch.float64) * 255
    return values.float().view(2, 3, 1, 1)


def pretrained_image_size(arch: str) -> int:
    """The image size at which torchvision validates the model's weights."""
    return get_model_weights(arch).DEFAULT.transforms().crop_size[0]


def contiguous_view(tensor: Tensor) -> Tensor:
    """View a channels_last tensor as contiguous (O, H, W, I); return others unchanged.

    Horovod accepts only contiguous tensors.
    """
    if tensor.dim() == 4 and not tensor.is_contiguous():
        return tensor.permute(0, 2, 3, 1)
    return tensor


class InMemoryOrder:
    """Passes gradients to a compressor as contiguous views, and restores their format.

    Source: https://horovod.readthedocs.io/en/stable/api.html#horovod.torch.Compressor
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
