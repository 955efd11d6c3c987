"""Optional: decodes only the needed part of a JPEG, with nvImageCodec on the CPU."""

import functools
import os
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor

from common.images import Picture


def open_picture(content: bytes) -> Picture | None:
    """Open a file; return None if nvImageCodec cannot read it.

    The library decodes only the rectangle that crop() gets, so that damage elsewhere in
    the file goes unnoticed.

    Source: https://docs.nvidia.com/cuda/nvimagecodec/py_api.html
    """
    codec, decoder, params = make_decoder(os.getpid())
    try:
        stream = codec.CodeStream(content)
        height, width = stream.height, stream.width
    except RuntimeError:
        return None

    def crop(top: int, left: int, rows: int, columns: int) -> Tensor:
        region = codec.Region(top, left, top + rows, left + columns)
        part = stream.get_sub_code_stream(region=region)
        image = decoder.decode(part, params=params)
        if image is None:
            raise ValueError("nvImageCodec cannot decode it; try another --decoder")
        return torch.from_numpy(numpy.asarray(image)).permute(2, 0, 1)

    return Picture(height, width, crop)


@functools.cache
def make_decoder(process: int) -> tuple[ModuleType, Any, Any]:
    """Return the library, this process's decoder, and the decoder's parameters."""
    if torch.utils.data.get_worker_info():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the import could open a GPU
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    from nvidia import nvimgcodec as codec

    decoder = codec.Decoder(
        device_id=codec.NVIMGCODEC_DEVICE_CPU_ONLY,
        max_num_cpu_threads=1,
        backends=[codec.Backend(codec.CPU_ONLY)],
    )
    return codec, decoder, codec.DecodeParams(apply_exif_orientation=False)
