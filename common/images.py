"""Reads image files as uint8 RGB and crops them."""

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional as F

from common.errors import UserError

NO_TORCHCODEC = ""  # the reason why Pillow is the default decoder
try:  # import once in the training process, not in each loader process
    from torchcodec.decoders import decode_jpeg
except (ImportError, OSError, RuntimeError) as error:  # missing, or for another PyTorch
    NO_TORCHCODEC = str(error.__cause__ or error).strip().split("\n")[0] or repr(error)

# The errors of decoders if a file is damaged, or if their library is missing
DECODE_ERRORS = (RuntimeError, OSError, ValueError, SyntaxError, EOFError, ImportError)
DECODE_ERRORS += (Image.DecompressionBombError,)
JPEG = b"\xff\xd8"  # the first bytes of each JPEG file
NO_EXIF = b"\xff\xe1\0\2"  # an empty APP1 segment; TorchCodec reads no other EXIF

# Chooses a part of an image: (height, width) -> (top, left, height, width), in pixels
Box = Callable[[int, int], tuple[int, int, int, int]]
# Decodes the part that a Box chooses, to a (3, H, W) uint8 tensor or a Pillow image.
# Like most ImageNet scripts, decoders ignore the EXIF orientation.
Decode = Callable[[Box], Tensor | Image.Image]
Transform = Callable[[Decode], Tensor]  # to a (3, S, S) uint8 tensor


def decode_with_pillow(content: bytes, box: Box) -> Image.Image:
    """Decode a file to a Pillow image, so that Pillow also resizes it later."""
    with Image.open(io.BytesIO(content)) as image:
        if image.mode == "F" or (image.mode, image.format) == ("I", "TIFF"):
            raise ValueError("32-bit pixels have no defined range; use 8 or 16 bits")
        if image.mode.startswith("I"):  # 16-bit gray: convert() would clip at 255
            image = Image.fromarray((numpy.asarray(image) >> 8).astype("uint8"))
        return F.crop(image.convert("RGB"), *box(image.height, image.width))


def decode_with_torchcodec(content: bytes, box: Box) -> Tensor:
    """Decode a JPEG with TorchCodec, and any other format with Pillow."""
    if not content.startswith(JPEG):
        return F.pil_to_tensor(decode_with_pillow(content, box))
    if NO_TORCHCODEC:
        raise ImportError(f"no TorchCodec ({NO_TORCHCODEC}); use --decoder pil")
    pixels = decode_jpeg(JPEG + NO_EXIF + content[len(JPEG) :])
    part = F.crop(pixels[None], *box(*pixels.shape[1:]))
    # Remove gaps between rows, in the decoder's format, so that resize() is faster
    return part.contiguous(memory_format=torch.channels_last)[0]


def decode_with_nvimgcodec(content: bytes, box: Box) -> Tensor:
    """Decode only part of a JPEG, with nvImageCodec; use Pillow for other formats."""
    from common import nvimgcodec

    pixels = nvimgcodec.decode(content, box) if content.startswith(JPEG) else None
    return decode_with_torchcodec(content, box) if pixels is None else pixels


DECODERS = {
    "torchcodec": decode_with_torchcodec,
    "pil": decode_with_pillow,
    "nvimgcodec": decode_with_nvimgcodec,
}


def read_image(
    path: str, decoder: str, transform: Transform, content: bytes | None = None
) -> Tensor:
    """Decode a file (or its `content`) with one of DECODERS, and transform the image.

    Raises a UserError that names the file and the reason if the file is not an image.
    """
    try:
        content = Path(path).read_bytes() if content is None else content
        return transform(partial(DECODERS[decoder], content))
    except DECODE_ERRORS as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UserError(f"--decoder {decoder} cannot read {path}: {reason}") from None


def train_transform(decode: Decode, size: int, min_crop: float, flip: bool) -> Tensor:
    """Return a random crop, resized to (3, size, size) uint8 and randomly mirrored."""

    def box(height: int, width: int) -> tuple[int, int, int, int]:
        # get_params() reads only the shape
        shape = torch.empty(height, width, device="meta")
        return RandomResizedCrop.get_params(shape, (min_crop, 1.0), (3 / 4, 4 / 3))

    pixels = F.resize(decode(box), [size, size])
    if flip and torch.rand(()) < 0.5:
        pixels = F.horizontal_flip(pixels)
    return pixels if isinstance(pixels, Tensor) else F.pil_to_tensor(pixels)


def val_transform(decode: Decode, size: int) -> Tensor:
    """Resize to 8/7 of `size`, and return the central (3, size, size) uint8 crop.

    For 224, this is Resize(256) and CenterCrop(224), as in the ResNet paper.
    """
    whole = decode(lambda height, width: (0, 0, height, width))
    pixels = F.center_crop(F.resize(whole, [size * 256 // 224]), [size])
    return pixels if isinstance(pixels, Tensor) else F.pil_to_tensor(pixels)
