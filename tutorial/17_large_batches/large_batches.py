"""Count the epochs that larger batches need with each rule for the learning rate.

python tutorial/17_large_batches/large_batches.py [FILE.json]    # {rule: [epochs]}
"""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IMAGES, EPOCHS, GOAL, BATCHES = 4096, 32, 0.95, (64, 256, 1024, 4096)
# Ten digits of 5 x 3 pixels, one bit per pixel
FONT = [31599, 9879, 29671, 29647, 23497, 31183, 31215, 29257, 31727, 31695]


def digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw `count` noisy images of digits (8 x 8 pixels); return images and labels."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=random)
    pixels = torch.tensor(FONT)[labels, None] >> torch.arange(14, -1, -1) & 1
    images = 0.25 * torch.randn(count, 8, 8, generator=random)
    images[:, 1:6, 2:5] += pixels.view(count, 5, 3)
    return images.flatten(1), labels


class LARS(torch.optim.Optimizer):
    """SGD with momentum; each matrix's step is proportional to the matrix's norm."""

    def __init__(self, weights, lr: float, momentum: float, decay=0.0):
        super().__init__(weights, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:
        """Update all weights; treat biases as SGD does."""
        for group in self.param_groups:
            decay, momentum = group["decay"], group["momentum"]
            for weight in group["params"]:
                gradient, rate = weight.grad, group["lr"]
                if weight.ndim > 1:
                    rate *= weight.norm() / (gradient.norm() + decay * weight.norm())
                    gradient = gradient + decay * weight
                state = self.state[weight]
                state["step"] = momentum * state.get("step", 0) + rate * gradient
                weight -= state["step"]


def epochs(optimizer: type, rate: float, batch: int) -> float:
    """Train to accuracy GOAL on new images; return the epochs needed, or infinity."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = optimizer(model.parameters(), lr=rate, momentum=0.9)
    (images, labels), (new_images, new_labels) = digits(IMAGES, 1), digits(1024, 2)
    for epoch in range(EPOCHS):
        chosen = torch.randperm(IMAGES).split(batch)
        for step, indices in enumerate(chosen, start=1):
            optimizer.zero_grad()
            F.cross_entropy(model(images[indices]), labels[indices]).backward()
            optimizer.step()
            if step % max(1, len(chosen) // 4) == 0:  # four times per epoch
                right = model(new_images).argmax(1) == new_labels
                if right.double().mean() >= GOAL:
                    return epoch + step / len(chosen)
    return float("inf")


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)  # rounding must not change the results
    SGD, found = torch.optim.SGD, {}
    rules = {"same rate": (SGD, 0.04, 0), "square root": (SGD, 0.04, 0.5)}
    rules |= {"linear": (SGD, 0.04, 1), "LARS, square root": (LARS, 0.004, 0.5)}
    print(f"{'batch':18}", *(f"{batch:6}" for batch in BATCHES))
    for name, (kind, rate, power) in rules.items():
        rates = [rate * (batch / BATCHES[0]) ** power for batch in BATCHES]
        found[name] = [epochs(kind, *one) for one in zip(rates, BATCHES, strict=True)]
        print(f"{name:18}", *(f"{epoch:6.2f}" for epoch in found[name]))
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(json.dumps(found))
