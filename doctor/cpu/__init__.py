"""Emulate CUDA on the CPU: `python -m doctor --cpu -- COMMAND` needs no GPU.

A tensor on an emulated GPU is a CPU tensor whose storage is marked. CPU kernels
replace CUDA's, and Gloo replaces NCCL. Operations may mix tensors on different
devices, because gradients that autograd creates have no mark.
"""

import os
from unittest import mock

NOT_CHECKED = "Emulated on the CPU: times, memory and GPU numerics are not checked."


def play(count: str | int = "") -> None:
    """Emulate `count` GPUs; by default, $LOCAL_WORLD_SIZE, or 2 if that is not set."""
    from . import cuda, gpus, groups, mode

    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="-1"):
        # CUDA reads the variable now, and never again: it sees no real GPU
        getattr(gpus.torch._C, "_cuda_getDeviceCount", int)()
    gpus.count = int(count or os.environ.get("LOCAL_WORLD_SIZE") or 2)
    for one in (cuda, groups, mode):
        one.install()
    gpus.replace_everywhere()
