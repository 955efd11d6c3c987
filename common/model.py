"""The model: any classification model of torchvision, a ResNet-18 by default."""

import argparse
import contextlib
import fcntl
import os
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision.models import WeightsEnum, get_model, get_model_weights
from torchvision.transforms.v2 import InterpolationMode

from common.errors import UserError


def architectures() -> list[str]:
    """Names of torchvision's classification models."""
    return torchvision.models.list_models(module=torchvision.models)


def build_model(args: argparse.Namespace, dataset: Dataset) -> nn.Module:
    """Build `args.arch`: (B, 3, S, S) images in, (B, classes) outputs.

    Its initial weights depend only on the seed, so they are the same in every process.
    Pretrained weights are read only if no checkpoint will replace them.

    Args:
        dataset: its `classes` give the number of outputs.

    Raises:
        UserError: the dataset has no `classes`; the pretrained weights are for another
            number of classes or another image size, or cannot be downloaded.
    """
    if not hasattr(dataset, "classes"):
        raise UserError(
            f"{type(dataset).__name__} has no `classes`: a list of class names, one "
            "for each output of the model"
        )
    weights = None
    if args.pretrained:
        weights = pretrained_weights(args, len(dataset.classes))
    if weights is None or resumes(args):
        return bare_model(args, len(dataset.classes))
    try:
        download_once(weights)
        model = get_model(args.arch, weights=weights)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--pretrained: cannot get the weights of {args.arch}: {error}"
        ) from None
    if args.arch == "inception_v3":
        model.aux_logits, model.AuxLogits = False, None
    return model


def bare_model(args: argparse.Namespace, classes: int) -> nn.Module:
    """Build `args.arch` with the initial weights for `args.seed`."""
    options = {}
    if args.arch in ("googlenet", "inception_v3"):  # one output in training
        options = {"aux_logits": False, "init_weights": True}
        options["transform_input"] = args.pretrained  # as torchvision sets it
    if args.arch.startswith("vit_"):
        options["image_size"] = args.image_size
    torch.manual_seed(args.seed)
    return get_model(args.arch, weights=None, num_classes=classes, **options)


def resumes(args: argparse.Namespace) -> bool:
    """Whether a checkpoint will replace the weights."""
    if args.resume == "auto":
        return Path(args.output, "checkpoint.pt").exists()
    return args.resume is not None


def pretrained_weights(args: argparse.Namespace, classes: int) -> WeightsEnum:
    """torchvision's best weights for `args.arch`, not downloaded yet.

    Raises:
        UserError: they do not fit the number of classes or the image size.
    """
    weights = get_model_weights(args.arch).DEFAULT
    known, size = len(weights.meta["categories"]), weights.meta["min_size"][0]
    if known != classes:
        raise UserError(
            f"--pretrained: the weights of {args.arch} are for {known} classes, "
            f"the data has {classes}"
        )
    if args.arch.startswith(("vit_", "maxvit")) and args.image_size != size:
        raise UserError(
            f"--pretrained: the weights of {args.arch} are for --image-size {size}, "
            f"not {args.image_size}"
        )
    return weights


def download_once(weights: WeightsEnum) -> None:
    """Download weights unless the cache has them, one process at a time."""
    folder = Path(torch.hub.get_dir())
    file = folder / "checkpoints" / os.path.basename(weights.url)
    if file.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "download.lock", "w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed, or this process ends
        if not file.exists():
            weights.get_state_dict(check_hash=True)


def validation_protocol(args: argparse.Namespace) -> tuple[int, int, InterpolationMode]:
    """How to crop validation images: (crop, shorter side before it, interpolation).

    Pretrained weights at their own image size use the protocol by which torchvision
    measured their accuracy. Everything else resizes to 8/7, as ResNet's paper does.

    Source: https://docs.pytorch.org/vision/stable/models.html#using-the-pre-trained-models
    """
    size = args.image_size
    if args.pretrained:
        preset = get_model_weights(args.arch).DEFAULT.transforms()
        if preset.crop_size == [size]:
            return size, preset.resize_size[0], preset.interpolation
    return size, size * 256 // 224, InterpolationMode.BILINEAR


def pretrained_normalisation(arch: str) -> Tensor:
    """(2, 3, 1, 1): mean and standard deviation that torchvision's weights expect.

    For pixels between 0 and 255; all but efficientnet_v2_l use ImageNet's.
    """
    preset = get_model_weights(arch).DEFAULT.transforms()
    values = torch.tensor([preset.mean, preset.std], dtype=torch.float64) * 255
    return values.float().view(2, 3, 1, 1)


def pretrained_image_size(arch: str) -> int:
    """The image size at which torchvision validates its weights."""
    return get_model_weights(arch).DEFAULT.transforms().crop_size[0]


def contiguous_view(tensor: Tensor) -> Tensor:
    """The same memory as a contiguous tensor: channels_last as (O, H, W, I).

    For libraries that accept only contiguous tensors. Other tensors are returned
    unchanged.
    """
    if tensor.dim() == 4 and not tensor.is_contiguous():
        return tensor.permute(0, 2, 3, 1)
    return tensor


class InMemoryOrder:
    """Passes gradients to a compressor as contiguous views, and restores their format.

    The compressor has `compress(tensor) -> (tensor, context)` and its reverse,
    `decompress`, like those of Horovod
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
    """Run the model on two images without content.

    Raises:
        UserError: `args.arch` cannot take images of `args.image_size`, or its
            pretrained weights do not fit.
    """
    if args.pretrained:
        pretrained_weights(args, classes)
    try:
        with torch.device("meta"):
            images = torch.empty(2, 3, args.image_size, args.image_size)
            bare_model(args, classes).train()(images)
    except NotImplementedError:
        return  # RegNet reads numbers from tensors; it takes images of any size
    except (RuntimeError, AssertionError, ValueError) as error:
        raise UserError(
            f"{args.arch} cannot train on images of --image-size {args.image_size}: "
            f"{error}"
        ) from None
