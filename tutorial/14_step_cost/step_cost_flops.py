"""Count the FLOPs and bytes of ResNet-50's training step, and compute its MFU.

python tutorial/14_step_cost/step_cost_flops.py    # times go to standard error
"""

import sys
from collections.abc import Callable
from time import process_time

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import resnet50

IMAGES, TRAINED = 256, 2  # batch sizes for counting and for training
GPUS = {  # peak FLOP/s (dense bf16), memory bytes/s, published images/s
    "A100, NCHW": (312e12, 2039e9, 1582),
    "A100, NHWC": (312e12, 2039e9, 2470),
    "H100, NCHW": (989e12, 3350e9, 2791),
}


class ByteCounter(TorchDispatchMode):
    """Add up the sizes of the tensors that each operation reads and writes."""

    moved = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if not operation.is_view:  # a view is a new name for the same memory
            tensors = tree_leaves((args, kwargs, result))
            self.moved += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        return result


def count(work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Call `work`; return its result, and its FLOPs and bytes per image."""
    with FlopCounterMode(display=False) as flops, ByteCounter() as traffic:
        result = work()
    return result, torch.tensor([flops.get_total_flops(), traffic.moved]) / IMAGES


def fastest(work: Callable[[], object]) -> float:
    """Call `work` three times; return the CPU seconds of the fastest call."""
    times = []
    for _ in range(3):
        began = process_time()
        work()
        times.append(process_time() - began)
    return min(times)


if __name__ == "__main__":
    with torch.device("meta"):  # its tensors have shapes but no data
        model = resnet50().bfloat16()
        images = torch.empty(IMAGES, 3, 224, 224, dtype=torch.bfloat16)
    loss, forward = count(lambda: model(images).sum())
    _, backward = count(loss.backward)
    flops, moved = (forward + backward).tolist()
    print("ResNet-50 in bf16, per image  GFLOP      MB")
    rows = {"forward": forward, "backward": backward, "step": forward + backward}
    for name, (operations, size) in rows.items():
        print(f"  {name:24} {operations / 1e9:8.2f} {size / 1e6:7.1f}")
    print(f"{flops / moved:.0f} FLOP per byte")
    print("images/s    limit: peak  limit: memory  published    MFU")
    for name, (peak, bandwidth, speed) in GPUS.items():
        limits = f"{peak / flops:12,.0f} {bandwidth / moved:14,.0f}"
        print(f"{name} {limits} {speed:10,} {speed * flops / peak:6.1%}")

    torch.set_num_threads(1)
    matrix, model = torch.randn(1024, 1024), resnet50()
    peak = 2 * 1024**3 / fastest(lambda: matrix @ matrix)
    images = torch.randn(TRAINED, 3, 224, 224)
    speed = TRAINED / fastest(lambda: model(images).sum().backward())
    print(f"matrix product on one core: {peak / 1e9:.0f} GFLOP/s", file=sys.stderr)
    print(f"training on one core: {speed:.1f} images/s", file=sys.stderr)
    print(f"MFU: {speed * flops / peak:.0%}", file=sys.stderr)
