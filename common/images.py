"""Reads image files as uint8 RGB."""

import io
from pathlib import Path

import numpy
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from common.errors import UserError

NO_TORCHCODEC = ""  # the reason why Pillow is the default decoder
try:  # import once in the training process, not in each loader process
    from torchcodec.decoders import decode_jpeg
except (ImportError, OSError, RuntimeError) as error:  # missing, or for another PyTorch
    NO_TORCHCODEC = str(error.__cause__ or error).strip().split("\n")[0] or repr(error)

DECODERS = ("torchcodec", "pil", "nvimgcodec")
# The errors of decoders if a file is damaged, or if their library is missing
DECODE_ERRORS = (RuntimeError, OSError, ValueError, SyntaxError, EOFError, ImportError)
DECODE_ERRORS += (Image.DecompressionBombError,)
JPEG = b"\xff\xd8"  # the first bytes of each JPEG file
NO_EXIF = b"\xff\xe1\0\2"  # an empty APP1 segment; TorchCodec reads no other EXIF


def read_image(
    path: str, decoder: str, transform: v2.Compose, content: bytes | None = None
) -> Tensor:
    """Decode a file (or its `content`) with one of DECODERS, and transform the image.

    Raises a UserError that names the file and the reason if the file is not an image.
    """
    try:
        content = Path(path).read_bytes() if content is None else content
        if decoder == "nvimgcodec" and content.startswith(JPEG):
            from common.nvimgcodec import read_jpeg

            return read_jpeg(content, transform)
        return transform(decode(content, decoder))
    except DECODE_ERRORS as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UserError(f"--decoder {decoder} cannot read {path}: {reason}") from None


def decode(content: bytes, decoder: str) -> Image.Image | Tensor:
    """Decode a file to a Pillow image (--decoder pil) or a (3, H, W) uint8 tensor.

    Like most ImageNet scripts, decoders ignore the EXIF orientation.
    """
    if decoder != "pil" and content.startswith(JPEG):
        if NO_TORCHCODEC:
            raise ImportError(f"no TorchCodec ({NO_TORCHCODEC}); use --decoder pil")
        return decode_jpeg(JPEG + NO_EXIF + content[len(JPEG) :])
    with Image.open(io.BytesIO(content)) as image:
        if image.mode == "F" or (image.mode, image.format) == ("I", "TIFF"):
            raise ValueError("32-bit pixels have no defined range; use 8 or 16 bits")
        if image.mode.startswith("I"):  # 16-bit gray: convert() would clip at 255
            image = Image.fromarray((numpy.asarray(image) >> 8).astype("uint8"))
        image = image.convert("RGB")
    return image if decoder == "pil" else F.pil_to_tensor(image)


class RandomResizedCrop(v2.RandomResizedCrop):
    """torchvision's, which resizes tensors faster after a copy without gaps."""

    def transform(self, image: Image.Image | Tensor, box: dict) -> Image.Image | Tensor:
        """Crop to `box` (top, left, height and width) and resize."""
        image = F.crop(image, **box)
        if isinstance(image, Tensor):  # keep the decoder's memory format
            image = image[None].contiguous(memory_format=torch.channels_last)[0]
        return F.resize(image, self.size, self.interpolation, antialias=self.antialias)

    _transform = transform  # its name before torchvision 0.21
