"""Reads image files as uint8 RGB and crops them."""

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional as F

from common.errors import UserError

# What decoders raise if a file is damaged, or if their library is missing
DECODE_ERRORS = (RuntimeError, OSError, ValueError, SyntaxError, EOFError, ImportError)
DECODE_ERRORS += (Image.DecompressionBombError,)
JPEG = b"\xff\xd8"  # the first bytes of each JPEG file
NO_EXIF = b"\xff\xe1\0\2"  # an empty APP1 segment, which could contain EXIF data


class Picture(NamedTuple):
    """An open image file: its size, and a function that returns a part of it.

    crop(top, left, height, width) returns a (3, height, width) uint8 tensor, or an RGB
    image of Pillow. As in most ImageNet scripts, the EXIF orientation is ignored.
    """

    height: int
    width: int
    crop: Callable[[int, int, int, int], Tensor | Image.Image]


def open_with_pillow(content: bytes) -> Picture:
    """Decode a file with Pillow, which also resizes it later."""
    with Image.open(io.BytesIO(content)) as image:
        pixels = image.convert("RGB")
    return Picture(pixels.height, pixels.width, partial(F.crop, pixels))


def open_with_torchcodec(content: bytes) -> Picture:
    """Decode a JPEG with TorchCodec, or another format with Pillow, to a tensor."""
    from torchcodec.decoders import decode_jpeg

    if content.startswith(JPEG):
        # An empty first APP1 segment makes TorchCodec ignore the EXIF orientation
        data = bytearray().join((JPEG, NO_EXIF, memoryview(content)[len(JPEG) :]))
        pixels = decode_jpeg(torch.frombuffer(data, dtype=torch.uint8))
    else:
        with Image.open(io.BytesIO(content)) as image:
            pixels = F.pil_to_tensor(image.convert("RGB"))

    def crop(*box: int) -> Tensor:
        # Without gaps between rows, in the decoder's format: resize() is then faster
        part = F.crop(pixels[None], *box)
        return part.contiguous(memory_format=torch.channels_last)[0]

    return Picture(*pixels.shape[1:], crop)


def open_with_nvimgcodec(content: bytes) -> Picture:
    """Open a file; nvImageCodec decodes only the part that is cropped."""
    from common import nvimgcodec

    return nvimgcodec.open_picture(content) or open_with_torchcodec(content)


DECODERS = {
    "torchcodec": open_with_torchcodec,
    "pil": open_with_pillow,
    "nvimgcodec": open_with_nvimgcodec,
}


def read_image(
    path: str,
    decoder: str,
    transform: Callable[[Picture], Tensor],
    content: bytes | None = None,
) -> Tensor:
    """Read a file (or its `content`), open it with one of DECODERS, transform it.

    Raises UserError, which names the file and the reason, if it is not an image.
    """
    try:
        content = Path(path).read_bytes() if content is None else content
        return transform(DECODERS[decoder](content))
    except DECODE_ERRORS as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UserError(f"--decoder {decoder} cannot read {path}: {reason}") from None


def train_transform(picture: Picture, size: int, min_crop: float, flip: bool) -> Tensor:
    """A random crop, resized to (3, size, size) uint8 and mirrored half of the time."""
    # get_params() reads nothing but the shape
    shape = torch.empty(picture.height, picture.width, device="meta")
    box = RandomResizedCrop.get_params(shape, (min_crop, 1.0), (3 / 4, 4 / 3))
    pixels = F.resize(picture.crop(*box), [size, size])
    if flip and torch.rand(()) < 0.5:
        pixels = F.horizontal_flip(pixels)
    return pixels if isinstance(pixels, Tensor) else F.pil_to_tensor(pixels)


def val_transform(picture: Picture, size: int) -> Tensor:
    """The central (3, size, size) uint8 crop, after resizing to 8/7 of its size.

    For 224, this is Resize(256) and CenterCrop(224), as in the ResNet paper.
    """
    whole = picture.crop(0, 0, picture.height, picture.width)
    pixels = F.center_crop(F.resize(whole, [size * 256 // 224]), [size])
    return pixels if isinstance(pixels, Tensor) else F.pil_to_tensor(pixels)
