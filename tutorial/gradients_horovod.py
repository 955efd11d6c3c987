"""The same with Horovod: which gradients DistributedOptimizer hands to the optimizer.

mpirun -np 2 --bind-to none --oversubscribe python tutorial/gradients_horovod.py
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

try:
    import horovod.torch as hvd
except ImportError as error:
    print(f"gradients_horovod.py needs Horovod: {error}", file=sys.stderr)
    sys.exit(2)


def gradients(x: Tensor, y: Tensor, **options) -> Tensor:
    """One backward pass; returns all gradients as one vector."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if options:
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), **options
        )
    F.cross_entropy(model(x), y).backward()  # hooks start the all-reduces
    if options:
        optimizer.synchronize()  # step() would do it: wait until they are complete
    return torch.cat([w.grad.flatten() for w in model.parameters()])


def main() -> None:
    """Both processes run this function, each with its own shard of one batch."""
    torch.manual_seed(1)
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    my_x, my_y = x[hvd.rank() :: 2], y[hvd.rank() :: 2]
    right = gradients(x, y)
    for title, options in {
        "op=hvd.Average, the default": {"op": hvd.Average},
        "op=hvd.Sum": {"op": hvd.Sum},
        "compression=hvd.Compression.fp16": {"compression": hvd.Compression.fp16},
    }.items():
        found = gradients(my_x, my_y, **options)
        error = ((found - right).abs().max() / right.abs().max()).item()
        verdict = f"off by {100 * error:.2f} %" if error > 1e-6 else "equal (to 1e-6)"
        if hvd.rank() == 0:
            print(f"{title:34} {verdict}")


if __name__ == "__main__":
    hvd.init()
    if hvd.size() != 2:
        print("start it with: mpirun -np 2 (Horovod built with MPI)", file=sys.stderr)
        sys.exit(2)
    main()
    hvd.shutdown()
