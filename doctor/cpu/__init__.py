"""Play CUDA on the CPU: `python -m doctor --cpu -- COMMAND` needs no GPU.

A tensor on an emulated GPU is a CPU tensor whose storage is marked; the CPU's kernels
do the work, and Gloo stands in for NCCL. Tensors on different devices may meet, because
the gradients that autograd makes have no mark.
"""

import os

NOT_CHECKED = "Emulated on the CPU: times, memory and GPU numerics are not checked."


def play(count: str | int = "") -> None:
    """Play CUDA in this process, right after it has imported PyTorch.

    Args:
        count: number of GPUs; if empty, $LOCAL_WORLD_SIZE, or else 2.
    """
    from . import cuda, gpus, groups, mode, training

    gpus.count = int(count or os.environ.get("LOCAL_WORLD_SIZE") or 2)
    for one in (cuda, groups, training):
        one.install()
    gpus.replace_everywhere()
    mode.install()
