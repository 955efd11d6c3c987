"""A larger batch needs a larger learning rate, up to a point, and a warm-up.

python tutorial/04_batches/batches_learning_rate.py
"""

import torch
from torch.optim.lr_scheduler import LambdaLR

torch.manual_seed(0)
TRUTH = torch.randn(10)
INPUTS = torch.randn(256, 10)
TARGETS = INPUTS @ TRUTH


def steps(weights: torch.Tensor, batch: int, lr: float) -> torch.Tensor:
    """Run SGD over all 256 samples, `batch` at a time; return the new weights."""
    weights = weights.clone().requires_grad_()
    for x, y in zip(INPUTS.split(batch), TARGETS.split(batch), strict=True):
        loss = (x @ weights - y).square().mean()
        (gradient,) = torch.autograd.grad(loss, weights)
        weights.data -= lr * gradient
    return weights.detach()


def main() -> None:
    """Compare eight small steps with one large step; print a warm-up schedule."""
    weights = torch.zeros(10)
    small = steps(weights, batch=32, lr=0.01)
    print(f"8 steps, batch  32, lr 0.01: moved {(small - weights).norm():.2f}")
    for lr in (0.01, 0.08):
        large = steps(weights, batch=256, lr=lr)
        print(f"1 step,  batch 256, lr {lr}: moved {(large - weights).norm():.2f}")

    print("\nsamples per step, learning rate (0.1 for 256), and its first values")
    for batch in (32, 256, 1024):
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1 * batch / 256)
        warm_up = LambdaLR(optimizer, lambda step: min(1, (step + 1) / 4))
        rates = []
        for _ in range(5):
            rates.append(f"{optimizer.param_groups[0]['lr']:.4f}")
            optimizer.step()
            warm_up.step()
        print(f"{batch:5} {0.1 * batch / 256:7.4f}:  {' '.join(rates)}")

    print("\nwhere the rule fails: loss after each of four epochs")
    for batch, lr in ((32, 0.1), (256, 0.8)):
        weights, losses = torch.zeros(10), []
        for _ in range(4):
            weights = steps(weights, batch, lr)
            losses.append((INPUTS @ weights - TARGETS).square().mean().item())
        print(f"batch {batch:3}, lr {lr}: {' '.join(f'{loss:.4f}' for loss in losses)}")


if __name__ == "__main__":
    main()
