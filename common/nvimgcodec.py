"""Optional: decodes only the needed part of a JPEG, with nvImageCodec on the CPU."""

import functools
import os
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor
from torchvision.transforms import v2

from common.images import decode


def read_jpeg(content: bytes, transform: v2.Compose) -> Tensor:
    """Decode a JPEG and transform it; TorchCodec decodes what nvImageCodec cannot."""
    crop, *others = transform.transforms
    if not isinstance(crop, v2.RandomResizedCrop):
        part = decode_part(content, None)
    elif (part := decode_part(content, crop)) is not None:
        resize = v2.Resize(crop.size, crop.interpolation, antialias=crop.antialias)
        transform = v2.Compose([resize, *others])
    return transform(decode(content, "torchcodec") if part is None else part)


def decode_part(content: bytes, crop: v2.RandomResizedCrop | None) -> Tensor | None:
    """Decode the part that `crop` chooses, or all; return None for unknown formats.

    Damage outside this part goes unnoticed, because only this part is decoded.

    Source: https://docs.nvidia.com/cuda/nvimagecodec/py_api.html
    """
    codec, decoder, params = make_decoder(os.getpid())
    try:
        stream = codec.CodeStream(content)
        if stream.num_channels == 4:  # CMYK, whose colors nvImageCodec may invert
            return None
    except RuntimeError:
        return None
    if crop:
        shape = torch.empty(stream.height, stream.width, device="meta")
        top, left, height, width = crop.get_params(shape, crop.scale, crop.ratio)
        region = codec.Region(top, left, top + height, left + width)
        stream = stream.get_sub_code_stream(region=region)
    image = decoder.decode(stream, params=params)
    if image is None:
        raise ValueError("nvImageCodec cannot decode it; try another --decoder")
    return torch.from_numpy(numpy.asarray(image)).permute(2, 0, 1)


@functools.cache
def make_decoder(process: int) -> tuple[ModuleType, Any, Any]:
    """Return the library, this process's decoder, and the decoder's parameters."""
    if torch.utils.data.get_worker_info():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the import could initialize a GPU
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    from nvidia import nvimgcodec as codec

    decoder = codec.Decoder(
        device_id=codec.NVIMGCODEC_DEVICE_CPU_ONLY,
        max_num_cpu_threads=1,
        backends=[codec.Backend(codec.CPU_ONLY)],
    )
    return codec, decoder, codec.DecodeParams(apply_exif_orientation=False)
