"""From the weights' shapes, compute a training step's memory; then measure it.

python tutorial/10_memory/memory.py [PARAMETERS]    # 25557032 for ResNet-50
"""

import argparse

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

BATCH = 512
SHAPES = [(64, 256), (256, 64)] * 4 + [(64, 10)]  # rows and columns of the weights
KINDS = ("weights", "gradients", "Adam's moments", "activations")
PER_PARAMETER = {  # bytes for the weight, its gradient and the optimizer state
    "fp32, SGD with momentum": (4, 4, 4),
    "fp32, Adam": (4, 4, 8),
    "bf16, Adam and a copy in fp32": (2, 2, 8 + 4),
}


def computed() -> tuple[int, ...]:
    """Compute how many bytes each of KINDS takes; Adam also stores step counts."""
    weights = 4 * sum(rows * columns for rows, columns in SHAPES)
    inputs = sum(rows for rows, _ in SHAPES) + 10  # of all layers and of the loss
    return weights, weights, 2 * weights + 4 * len(SHAPES), 4 * BATCH * inputs


def measured() -> tuple[int, ...]:
    """Measure how many bytes each of KINDS takes in one training step."""
    weights = [torch.randn(shape, requires_grad=True) for shape in SHAPES]
    optimizer = torch.optim.Adam(weights)
    x, kept = torch.randn(BATCH, 64), []  # kept by autograd for the backward pass
    with saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        for wide, narrow in zip(weights[:-1:2], weights[1::2], strict=True):
            x = (x @ wide).relu() @ narrow
        loss = (x @ weights[-1]).square().mean()
    loss.backward()
    optimizer.step()
    state = [value for each in optimizer.state.values() for value in each.values()]
    held = [total(t) for t in (weights, [w.grad for w in weights], state)]
    return *held, total(weights + kept) - held[0]


def total(tensors: list[Tensor]) -> int:
    """Return the bytes that these tensors occupy; count shared memory only once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("parameters", type=float, nargs="?", default=1e9)
    count = parser.parse_args().parameters
    print(f"bytes of one step{'computed':>12} {'measured':>10}")
    for row in zip(KINDS, computed(), measured(), strict=True):
        print("  {:16} {:10,} {:10,}".format(*row))
    print(f"{f'GB, {count:,.0f} parameters':32}   weights gradients optimizer      sum")
    for name, n in PER_PARAMETER.items():
        print(f"  {name:30}", *(f"{b * count / 1e9:9.1f}" for b in (*n, sum(n))))
