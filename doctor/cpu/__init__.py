"""Play CUDA on the CPU: `python -m doctor --cpu -- COMMAND` runs a script without GPUs.

play() is called right after PyTorch has been imported. From then on, each process has
GPUs as far as its Python code can see: a tensor on a played GPU is a CPU tensor whose
storage is marked, Gloo stands in for NCCL, and the CPU's kernels compute. Tensors on
different devices may meet, because the gradients that autograd makes are not marked.
Memory, speed, streams and the numerics of GPUs are not played.
"""

import os

NOT_CHECKED = "Played on the CPU: times, memory and GPU numerics are not checked."


def play(count: str | int = "") -> None:
    """Play CUDA in this process, which has imported PyTorch.

    Args:
        count: number of GPUs; if empty, $LOCAL_WORLD_SIZE, or else 2.
    """
    from . import cuda, gpus, groups, mode, training

    gpus.count = int(count or os.environ.get("LOCAL_WORLD_SIZE") or 2)
    for one in (cuda, groups, training):
        one.install()
    gpus.replace_everywhere()
    mode.install()
