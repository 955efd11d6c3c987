"""Four backward passes per step, and gradient clipping, with Horovod.

mpirun -np 2 --bind-to none --oversubscribe \
    python tutorial/13_horovod/horovod_accumulation.py
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

try:
    import horovod.torch as hvd
except ImportError as error:
    print(f"horovod_accumulation.py needs Horovod: {error}", file=sys.stderr)
    sys.exit(2)

PASSES = 4


class Counting(hvd.Compression.none):
    """A compressor that only counts its calls: one per tensor that Horovod sends."""

    tensors = 0

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, None]:
        """Count the tensor and return it unchanged."""
        Counting.tensors += 1
        return tensor, None


def say(*words: object) -> None:
    """Print `words` on rank 0 only."""
    if hvd.rank() == 0:
        print(*words)


def main() -> None:
    """All processes run this function, each with its own shard of one batch."""
    x, y = torch.randn(32, 6), torch.randint(3, (32,))
    model = nn.Linear(6, 3)
    F.cross_entropy(model(x), y).backward()  # all 32 samples at once
    right = [w.grad.clone() for w in model.parameters()]

    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model.named_parameters(),
        compression=Counting,
        backward_passes_per_step=PASSES,
    )
    optimizer.zero_grad()
    mine = slice(hvd.rank(), None, hvd.size())
    parts = zip(x[mine].chunk(PASSES), y[mine].chunk(PASSES), strict=True)
    for number, (part_x, part_y) in enumerate(parts, start=1):
        F.cross_entropy(model(part_x), part_y).backward()
        say(f"after backward {number}: {Counting.tensors} tensors all-reduced")

    optimizer.synchronize()  # waits until the gradients are averaged
    pairs = list(zip(model.parameters(), right, strict=True))
    for factor in (1, PASSES):
        equal = all(torch.allclose(w.grad, factor * r, atol=1e-6) for w, r in pairs)
        say(f"gradients equal {factor} x those of all 32 samples: {equal}")

    nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
    before = parameters_to_vector(model.parameters())
    with optimizer.skip_synchronize():
        optimizer.step()
    say(f"after step: {Counting.tensors} tensors all-reduced")
    moved = (parameters_to_vector(model.parameters()) - before).norm()
    say(f"the parameters moved by {moved:.3f}")


if __name__ == "__main__":
    hvd.init()
    torch.manual_seed(0)
    main()
    hvd.shutdown()
