"""Accuracy and timing meters."""

import importlib
import math
import os
import resource
import time
from collections.abc import Callable

import torch
from torch import Tensor

# A module whose after_interval() is called after each print interval, for benchmarks
HOOK = os.environ.get("INTERVAL_HOOK")


class Meter:
    """Adds up named numbers on the device; the host waits for them only in reduce()."""

    def __init__(self):
        self.sums: dict[str, Tensor | float] = {}

    def add(self, sums: dict[str, Tensor | float]) -> None:
        """Add a batch's sums: numbers, or tensors of any shape."""
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0) + value

    def reduce(self, all_reduce: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return the sums over all processes since the last call: float64, on the CPU.

        `all_reduce` sums an (N,) float64 tensor over all processes.
        """
        sums, self.sums = self.sums, {}
        device = next(v.device for v in sums.values() if isinstance(v, Tensor))
        tensors = [
            torch.as_tensor(value, dtype=torch.float64, device=device)
            for value in sums.values()
        ]
        flat = all_reduce(torch.cat([one.flatten() for one in tensors])).cpu()
        parts = flat.split([one.numel() for one in tensors])
        return {
            name: part.view(one.shape)
            for name, part, one in zip(sums, parts, tensors, strict=True)
        }


def batch_sums(
    loss: Tensor, outputs: Tensor, labels: Tensor
) -> dict[str, Tensor | float]:
    """Sums over one batch: loss, top-1 and top-5 hits times 100, and images.

    `loss` is the batch's mean, `outputs` are (B, classes) and `labels` (B,) int64. To
    add a metric, add its name and its sum over the batch.
    """
    best = outputs.detach().topk(min(5, outputs.size(1)), dim=1).indices
    hits = best == labels.unsqueeze(1)
    return {
        "loss": loss.detach().double() * len(labels),
        "top1": 100 * hits[:, 0].sum(),
        "top5": 100 * hits.sum(),
        "images": len(labels),
    }


def averages(sums: dict[str, Tensor]) -> dict[str, float | list]:
    """Divide all sums except "images" by the number of images."""
    images = sums["images"].item()
    means = {
        name: (value / images if images else value * math.nan).tolist()
        for name, value in sums.items()
        if name != "images"
    }
    return {**means, "images": int(images)}


def in_words(means: dict[str, float | list]) -> str:
    """Format averages: "loss 1.2345, top1 50.0000, top5 75.0000"."""
    numbers = {name: v for name, v in means.items() if isinstance(v, float)}
    return ", ".join(f"{name} {value:.4f}" for name, value in numbers.items())


class Timer:
    """Times one epoch's training, from one print interval to the next."""

    def __init__(self):
        self.intervals: list[tuple[float, int, float]] = []
        self.hook = importlib.import_module(HOOK).after_interval if HOOK else None
        self.began, self.waited = time.perf_counter(), 0.0

    def interval(self, step: int, images: int, waited: float) -> str:
        """End an interval at `step`, when the device has finished its work.

        Args:
            step: the step in the epoch, counted from 1.
            images: this interval's images, of all processes.
            waited: seconds that this process has waited for data in this epoch. On a
                GPU, this is an upper bound: the host runs ahead of the device.

        Returns:
            The interval's speed in words.
        """
        seconds, wait = time.perf_counter() - self.began, waited - self.waited
        self.intervals.append((seconds, images, wait))
        if self.hook:
            self.hook(step, seconds, images, wait)
        self.began, self.waited = time.perf_counter(), waited
        share = wait / seconds
        return f"{images / seconds:.0f} images/s, waited for data {share:.0%}"

    def figures(self, device: torch.device) -> dict[str, float]:
        """The epoch's seconds, images per second, share of waiting, and peak memory.

        The speed and the share of waiting leave out the first interval, in which loader
        processes, caches and compilers start.
        """
        measured = self.intervals[1:] or self.intervals
        seconds, images, waited = map(sum, zip(*measured, strict=True))
        if device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(device)
        else:
            memory = 2**10 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {
            "seconds": sum(seconds for seconds, *_ in self.intervals),
            "images_per_second": images / seconds,
            "data_wait": waited / seconds,
            "peak_memory_mib": memory / 2**20,
        }
