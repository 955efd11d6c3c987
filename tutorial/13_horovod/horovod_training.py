"""Data-parallel training with Horovod: ranks, equal weights, averaged gradients.

mpirun -np 2 --bind-to none --oversubscribe \
    python tutorial/13_horovod/horovod_training.py
"""

import sys

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

try:
    import horovod.torch as hvd
except ImportError as error:
    print(f"horovod_training.py needs Horovod: {error}", file=sys.stderr)
    sys.exit(2)


def build(seed: int) -> nn.Module:
    """Build a tiny model whose weights depend on the seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def weights(model: nn.Module) -> Tensor:
    """Return all weights as one vector."""
    return parameters_to_vector(model.parameters()).detach()


def equal(model: nn.Module) -> bool:
    """Return whether the weights are bitwise equal in all processes."""
    found = hvd.allgather(weights(model)[None])  # (processes, weights)
    return (found == found[0]).all().item()


def train(model: nn.Module, optimizer: optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Take three training steps on samples `x` (N, 6) with labels `y` (N,)."""
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # Horovod's hooks start the all-reduces
        optimizer.step()  # Horovod's step() waits for them first


def say(*words: object) -> None:
    """Print `words` on rank 0 only."""
    if hvd.rank() == 0:
        print(*words)


def main() -> None:
    """All processes run this function, each with its own shard of one batch."""
    place = f"rank {hvd.rank()} of {hvd.size()}, local rank {hvd.local_rank()}"
    for line in hvd.allgather_object(place):
        say(line)
    x, y = torch.randn(8, 6), torch.randint(3, (8,))  # the same in both processes

    model = build(seed=hvd.rank())
    say("equal weights after building:", equal(model))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    say("equal weights before training:", equal(model))

    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    train(model, optimizer, x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()])
    say("equal weights after training:", equal(model))

    alone = build(seed=0)
    train(alone, optim.SGD(alone.parameters(), lr=0.1), x, y)
    same = torch.allclose(weights(model), weights(alone), atol=1e-6)
    say("like one process with all samples:", same)


if __name__ == "__main__":
    hvd.init()
    torch.manual_seed(1)
    main()
    hvd.shutdown()
