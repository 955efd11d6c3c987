"""Show what autocast casts, and how the loss scale changes from step to step.

python tutorial/09_mixed_precision/amp.py
"""

import torch
from torch import nn
from torch.nn import functional as F


def casts() -> None:
    """Print the result dtypes of operations under fp16 autocast on a CPU."""
    images, kernel = torch.randn(4, 3, 8, 8), torch.randn(8, 3, 3, 3)
    a, weight = torch.randn(4, 4), nn.Parameter(torch.randn(4, 4))
    with torch.autocast("cpu", torch.float16):
        hidden = F.linear(a, weight)
        for name, result in {
            "weight": weight,
            "conv2d(image, kernel)": F.conv2d(images, kernel),
            "linear(a, weight)": hidden,
            "relu(linear)": hidden.relu(),
            "linear + a": hidden + a,
            "mse_loss(linear, a)": F.mse_loss(hidden, a),
        }.items():
            print(f"  {name:21} {result.dtype}")
    hidden.sum().backward()
    print(f"  {'gradient of weight':21} {weight.grad.dtype}")


def underflow() -> None:
    """Print what becomes of small gradients in fp16, with and without a loss scale."""
    for gradient in torch.tensor([1e-4, 1e-6, 1e-8]):
        scaled = (gradient * 65536).half()
        print(
            f"  {gradient:.1e}: without scaling {gradient.half().item():.1e}, "
            f"with a loss scale of 65536 {scaled.float() / 65536:.1e}"
        )


def loss_scale() -> None:
    """Train ten steps; the loss in step 4 is deliberately too large for fp16."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    for step in range(10):
        x, y = torch.randn(16, 8), torch.randn(16, 1)
        before, weight = scaler.get_scale(), model.weight.detach().clone()
        with torch.autocast("cpu", torch.float16):
            outputs = model(x)
        loss = F.mse_loss(outputs.float(), y) * (10_000 if step == 4 else 1)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # unscales the gradients; skips if one is inf or nan
        scaler.update()  # halves the scale after a skip, doubles it after 3 good steps
        stepped = "stepped" if (model.weight != weight).any() else "skipped"
        after = scaler.get_scale()
        print(f"  step {step}: scale {before:5.0f}, {stepped:7}, then {after:5.0f}")


if __name__ == "__main__":
    print("types under torch.autocast('cpu', torch.float16)")
    casts()
    print("gradients stored in fp16")
    underflow()
    print("GradScaler over ten steps")
    loss_scale()
