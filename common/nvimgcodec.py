"""Decodes only the needed part of a JPEG, with NVIDIA nvImageCodec on the CPU."""

import functools
import os
import subprocess
import sys
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
def check_library() -> None:
    """Raise an ImportError if nvImageCodec is missing, too old or cannot be imported.

    A child process imports it: an import opens a GPU if it finds the nvJPEG library.
    """
    code = "from nvidia import nvimgcodec as codec\n"
    code += "hasattr(codec, 'NVIMGCODEC_DEVICE_CPU_ONLY') or exit('older than 0.9')"
    command = [sys.executable, "-c", code]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"}
    child = subprocess.run(command, env=hidden, capture_output=True, text=True)
    if child.returncode:
        lines = child.stderr.splitlines() or [f"exit status {child.returncode}"]
        raise ImportError(lines[-1].split("Error: ", 1)[-1])


@functools.cache
def make_decoder(process: int) -> tuple[ModuleType, Any, Any]:
    """Return the library, this process's decoder, and the decoder's parameters."""
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)  # the import's warnings are about GPUs
        from nvidia import nvimgcodec as codec
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)
    decoder = codec.Decoder(
        device_id=codec.NVIMGCODEC_DEVICE_CPU_ONLY,
        max_num_cpu_threads=1,
        backends=[codec.Backend(codec.CPU_ONLY)],
    )
    return codec, decoder, codec.DecodeParams(apply_exif_orientation=False)
