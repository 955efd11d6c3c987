"""Reads image files as uint8 RGB and crops them."""

import functools
import io
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from common import nvimgcodec
from common.errors import ImageError, UserError, say, speaks_for_machine

# Errors that decoders raise if a file is damaged or not an image
READ_ERRORS = (RuntimeError, OSError, ValueError, SyntaxError, EOFError)
READ_ERRORS += (Image.DecompressionBombError,)
Pixels = Tensor | Image.Image  # (3, H, W) uint8, or an RGB image from Pillow
JPEG = b"\xff\xd8"  # the first bytes of each JPEG file
NO_EXIF = b"\xff\xe1\0\2"  # an empty APP1 segment, which could contain EXIF data


class Picture(Protocol):
    """An open image file.

    All decoders ignore the EXIF orientation, as ImageNet scripts do, and keep the upper
    8 bits of 16-bit samples.
    """

    height: int
    width: int

    def read(self, top: int, left: int, height: int, width: int) -> Pixels:
        """Read a rectangle of pixels."""


class PillowPicture:
    """The whole file, decoded and resized by Pillow, as most training scripts do."""

    def __init__(self, content: bytes):
        with Image.open(io.BytesIO(content)) as image:
            if image.mode.startswith("I"):  # 16 bits: convert() would clip at 255
                image = Image.fromarray((numpy.asarray(image) >> 8).astype("uint8"))
            self.image = image.convert("RGB")
        self.width, self.height = self.image.size

    def read(self, top: int, left: int, height: int, width: int) -> Image.Image:
        """Read a rectangle of pixels."""
        return self.image.crop((left, top, left + width, top + height))


class TensorPicture:
    """The whole file, decoded to a (3, H, W) uint8 tensor."""

    def __init__(self, pixels: Tensor):
        self.pixels = pixels
        _, self.height, self.width = pixels.shape

    def read(self, top: int, left: int, height: int, width: int) -> Tensor:
        """Read a rectangle of pixels: a (3, height, width) uint8 view."""
        return self.pixels[:, top : top + height, left : left + width]


def open_with_torchcodec(content: bytes) -> TensorPicture:
    """Decode a JPEG with TorchCodec, or another format with Pillow."""
    if not content.startswith(JPEG):
        return open_with_pillow(content)
    # An empty first APP1 segment makes TorchCodec ignore the EXIF orientation
    data = bytearray().join((JPEG, NO_EXIF, memoryview(content)[len(JPEG) :]))
    return TensorPicture(import_torchcodec()(torch.frombuffer(data, dtype=torch.uint8)))


def open_with_pillow(content: bytes) -> TensorPicture:
    """Decode a file with Pillow."""
    return TensorPicture(F.pil_to_tensor(PillowPicture(content).image))


@functools.cache
def import_torchcodec() -> Callable[[Tensor], Tensor]:
    """Return TorchCodec's JPEG decoder; fails if it is missing or does not fit."""
    from torchcodec.decoders import decode_jpeg

    return decode_jpeg


DECODERS: dict[str, Callable[[bytes], Picture]] = {
    "torchcodec": open_with_torchcodec,
    "nvimgcodec": lambda content: nvimgcodec.open_picture(content, open_with_pillow),
    "pil": PillowPicture,
}


def choose_decoder(name: str) -> str:
    """Return `name`; replace "auto" with the name of an installed decoder.

    Raises UserError if the decoder is not installed.
    """
    libraries = {
        "nvimgcodec": (nvimgcodec.check_library, "requirements/nvimgcodec.txt"),
        "torchcodec": (import_torchcodec, "requirements.txt"),
    }
    for decoder, (check, requirements) in libraries.items():
        if name in ("auto", decoder):
            try:
                check()
                return decoder
            except Exception as error:  # TorchCodec may be for another PyTorch
                reason = (str(error) or repr(error)).splitlines()[0]
                reason += f"; pip install -r {requirements}"
                if name == decoder:
                    raise UserError(f"--decoder {name}: {reason}") from None
    if name == "auto" and speaks_for_machine():
        say(f"--decoder pil, which is slower: {reason}")
    return "pil"


def read_image(
    path: str,
    decoder: str,
    transform: Callable[[Picture], Tensor],
    read: Callable[[], bytes] | None = None,
) -> Tensor:
    """Read a file, decode it with one of DECODERS and transform it.

    `read`, if given, returns the file's content. If that fails or the content is not an
    image, raises ImageError, which names `path`, the decoder and the reason.
    """
    try:
        content = read() if read else Path(path).read_bytes()
        return transform(DECODERS[decoder](content))
    except READ_ERRORS as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        # Remove the location in TorchCodec's source code, and the object's address
        reason = re.sub(r"^\w+, \S+\.cpp:\d+, | <_io\.BytesIO.*>", "", reason)
        raise ImageError(
            f"cannot read the image {path} with {decoder}: {reason}"
        ) from error


def random_box(height: int, width: int, min_crop: float) -> tuple[int, int, int, int]:
    """Draw a box of random area, shape and position: (top, left, height, width).

    The box covers at least a fraction `min_crop` of the image; its width is 3/4 to 4/3
    of its height. If ten boxes do not fit, the result is a central box. The
    distribution is that of torchvision's RandomResizedCrop, which draws one-element
    tensors instead of numbers.

    Source: Szegedy et al. 2014, https://arxiv.org/abs/1409.4842, section 6
    """
    narrow, wide = 3 / 4, 4 / 3
    for _ in range(10):
        area = height * width * random.uniform(min_crop, 1.0)
        ratio = math.exp(random.uniform(math.log(narrow), math.log(wide)))
        box_width = round(math.sqrt(area * ratio))
        box_height = round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            top = random.randint(0, height - box_height)
            left = random.randint(0, width - box_width)
            return top, left, box_height, box_width
    box_width = min(width, round(height * wide))
    box_height = min(height, round(width / narrow))
    top, left = (height - box_height) // 2, (width - box_width) // 2
    return top, left, box_height, box_width


class TrainTransform:
    """A random crop, resized to (3, size, size) and flipped half of the time."""

    def __init__(self, size: int, min_crop: float, flip: bool):
        self.size = size
        self.min_crop = min_crop
        self.flip = flip

    def __call__(self, picture: Picture) -> Tensor:
        """Crop and resize an image to a (3, size, size) uint8 tensor."""
        box = random_box(picture.height, picture.width, self.min_crop)
        pixels = F.resize(picture.read(*box), [self.size, self.size])
        if self.flip and random.random() < 0.5:
            pixels = F.horizontal_flip(pixels)
        return to_tensor(pixels)


class ValTransform:
    """The central (3, size, size) crop of an image with shorter side `resized`.

    (224, 256, InterpolationMode.BILINEAR) matches Resize(256) and CenterCrop(224).
    """

    def __init__(self, size: int, resized: int, interpolation: InterpolationMode):
        self.size = size
        self.resized = resized
        self.interpolation = interpolation

    def __call__(self, picture: Picture) -> Tensor:
        """Resize and crop an image to a (3, size, size) uint8 tensor."""
        whole = picture.read(0, 0, picture.height, picture.width)
        pixels = F.resize(whole, [self.resized], self.interpolation)
        return to_tensor(F.center_crop(pixels, [self.size]))


def to_tensor(pixels: Pixels) -> Tensor:
    """Convert the decoder's pixels to a (3, H, W) uint8 tensor."""
    return pixels if isinstance(pixels, Tensor) else F.pil_to_tensor(pixels)
