"""Loss and accuracy as named sums on the device."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

COUNTS = ("images", "stop")  # sums that are not averages over images


class Meter:
    """Adds up named numbers on the device; the host waits for them only in `reduce`."""

    def __init__(self):
        self.sums: dict[str, Tensor | float] = {}

    def add(self, **values: Tensor | float) -> None:
        """Add each value, a number or a one-element tensor, to the sum of that name."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0) + value

    def reduce(
        self, all_reduce: Callable[[Tensor], Tensor], **more: float
    ) -> dict[str, float]:
        """Add `more`, then return the sums over all processes since the last call.

        `all_reduce` sums an (N,) float64 tensor over all processes.
        """
        self.add(**more)
        sums, self.sums = self.sums, {}
        tensors = [value for value in sums.values() if isinstance(value, Tensor)]
        options = {"dtype": torch.float64, "device": tensors[0].device}
        own = [torch.as_tensor(value, **options) for value in sums.values()]
        return dict(zip(sums, all_reduce(torch.stack(own)).tolist(), strict=True))


def batch_sums(
    loss: Tensor, outputs: Tensor, labels: Tensor
) -> dict[str, Tensor | int]:
    """Sums over one batch: loss, top-1 and top-5 hits times 100, and images.

    `loss` is the batch's mean, `outputs` are (B, classes) and `labels` (B,) int64. To
    add a metric, add its name and sum; `averages` divides it by the number of images.
    """
    best = outputs.detach().topk(min(5, outputs.size(1)), dim=1).indices
    hits = best == labels.unsqueeze(1)
    return {
        "loss": loss.detach().double() * len(labels),
        "top1": 100 * hits[:, 0].sum(),
        "top5": 100 * hits.sum(),
        "images": len(labels),
    }


def averages(sums: dict[str, float]) -> dict[str, float]:
    """Divide all sums except COUNTS by the number of images."""
    images = sums["images"]
    means = {
        name: value / images if images else math.nan
        for name, value in sums.items()
        if name not in COUNTS
    }
    return {**means, "images": int(images), "stop": sums.get("stop", 0) > 0}
