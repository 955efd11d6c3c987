"""The same with Horovod: backward_passes_per_step.

mpirun -np 2 --bind-to none --oversubscribe python tutorial/accumulation_horovod.py
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

try:
    import horovod.torch as hvd
except ImportError as error:
    print(f"accumulation_horovod.py needs Horovod: {error}", file=sys.stderr)
    sys.exit(2)

PASSES = 4


class Counting(hvd.Compression.none):
    """No compression, but it is asked for each tensor that is all-reduced."""

    tensors = 0

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Count, and hand on what came."""
        Counting.tensors += 1
        return tensor, None


def main() -> None:
    """Both processes run this function, each with its own shard of one batch."""
    torch.manual_seed(1)
    x, y = torch.randn(32, 6), torch.randint(3, (32,))
    my_x, my_y = x[hvd.rank() :: 2], y[hvd.rank() :: 2]
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    F.cross_entropy(model(x), y).backward()  # all 32 samples at once
    right = [w.grad.clone() for w in model.parameters()]

    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        compression=Counting,
        backward_passes_per_step=PASSES,
    )
    optimizer.zero_grad()

    parts = zip(my_x.chunk(PASSES), my_y.chunk(PASSES), strict=True)
    for number, (part_x, part_y) in enumerate(parts, start=1):
        F.cross_entropy(model(part_x), part_y).backward()
        if hvd.rank() == 0:
            print(f"after backward {number}: {Counting.tensors} tensors all-reduced")
    optimizer.synchronize()

    pairs = list(zip(model.parameters(), right, strict=True))
    for factor in (1, PASSES):
        equal = all(torch.allclose(w.grad, factor * r, atol=1e-6) for w, r in pairs)
        if hvd.rank() == 0:
            print(f"gradients equal {factor} x those of all 32 at once: {equal}")


if __name__ == "__main__":
    hvd.init()
    if hvd.size() != 2:
        print("start it with: mpirun -np 2 (Horovod built with MPI)", file=sys.stderr)
        sys.exit(2)
    main()
    hvd.shutdown()
