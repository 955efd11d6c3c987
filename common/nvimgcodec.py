"""Decodes only the needed part of a JPEG, with NVIDIA nvImageCodec on the CPU."""

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor


class NvimgcodecPicture:
    """An image file; nvImageCodec decodes only the rectangle that is read.

    Damage elsewhere in the file goes unnoticed. The library does not report why it
    cannot read a file, so `otherwise` then reads the file or raises an error.

    Source: https://docs.nvidia.com/cuda/nvimagecodec/py_api.html
    """

    def __init__(self, content: bytes, otherwise: Callable):
        self.content = content
        self.otherwise = otherwise
        self.codec, self.decoder, self.params = make_decoder(os.getpid())
        self.stream = self.codec.CodeStream(content)
        self.height, self.width = self.stream.height, self.stream.width

    def read(self, top: int, left: int, height: int, width: int) -> Tensor:
        """Read a rectangle of pixels: a (3, height, width) uint8 tensor."""
        region = self.codec.Region(top, left, top + height, left + width)
        part = self.stream.get_sub_code_stream(region=region)
        image = self.decoder.decode(part, params=self.params)
        if image is None:
            return self.otherwise(self.content).read(top, left, height, width)
        return torch.from_numpy(numpy.asarray(image)).permute(2, 0, 1)


def open_picture(content: bytes, otherwise: Callable) -> Any:
    """Open a file; `otherwise(content)` opens it if nvImageCodec cannot."""
    make_decoder(os.getpid())  # raises the error if no decoder can be created
    try:
        return NvimgcodecPicture(content, otherwise)
    except RuntimeError:
        return otherwise(content)


@functools.cache
def import_library() -> ModuleType:
    """Import nvImageCodec without its warnings about GPUs, or raise an ImportError."""
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    stderr = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        from nvidia import nvimgcodec
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)
    if not hasattr(nvimgcodec.CodeStream, "get_sub_code_stream"):
        raise ImportError("this nvImageCodec is too old")
    return nvimgcodec


@functools.cache
def make_decoder(process: int) -> tuple[ModuleType, Any, Any]:
    """Return the library, this process's decoder, and the decoder's parameters."""
    codec = import_library()
    decoder = codec.Decoder(
        device_id=codec.NVIMGCODEC_DEVICE_CPU_ONLY,
        max_num_cpu_threads=1,
        backends=[codec.Backend(codec.CPU_ONLY)],
    )
    return codec, decoder, codec.DecodeParams(apply_exif_orientation=False)
