"""Meters for loss, accuracy and time."""

import importlib
import os
import resource
import time
from collections.abc import Callable

import torch
from torch import Tensor

HOOK = os.environ.get("INTERVAL_HOOK")  # benchmarks: a module to call each interval


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
        options = {"dtype": torch.float64, "device": sums["loss"].device}
        tensors = [torch.as_tensor(value, **options) for value in sums.values()]
        flat = all_reduce(torch.cat([one.flatten() for one in tensors])).cpu()
        parts = flat.split([one.numel() for one in tensors])
        shaped = (
            part.view(one.shape) for part, one in zip(parts, tensors, strict=True)
        )
        return dict(zip(sums, shaped, strict=True))


def batch_sums(
    loss: Tensor, outputs: Tensor, labels: Tensor
) -> dict[str, Tensor | float]:
    """Return one batch's sums: loss, top-1 and top-5 hits times 100, and images.

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
    means = {name: (value / sums["images"]).tolist() for name, value in sums.items()}
    return {**means, "images": int(sums["images"])}


def in_words(means: dict[str, float | list]) -> str:
    """Format averages: "loss 1.2345, top1 50.0000, top5 75.0000"."""
    numbers = {name: v for name, v in means.items() if isinstance(v, float)}
    return ", ".join(f"{name} {value:.4f}" for name, value in numbers.items())


class Timer:
    """Times one epoch's training, from one print interval to the next."""

    def __init__(self):
        self.intervals: list[tuple[float, int, float]] = []
        self.began, self.waited = time.perf_counter(), 0.0

    def interval(self, step: int, images: int, waited: float) -> str:
        """End an interval once the device has finished `step`; describe its speed.

        `images` is the number for all processes in this interval. `waited` is how many
        seconds this process has waited for data in this epoch; a GPU may have been idle
        for less time, because the host runs ahead of it.
        """
        seconds, wait = time.perf_counter() - self.began, waited - self.waited
        self.intervals.append((seconds, images, wait))
        if HOOK:
            importlib.import_module(HOOK).after_interval(step, seconds, images, wait)
        self.began, self.waited = time.perf_counter(), waited
        return f"{images / seconds:.0f} images/s, waited for data {wait / seconds:.0%}"

    def figures(self, device: torch.device) -> dict[str, float]:
        """Return an epoch's time, speed and data-wait share, and the run's peak memory.

        The speed and the share leave out the first interval, in which loader processes
        and compilers start and caches fill.
        """
        measured = self.intervals[1:] or self.intervals
        seconds, images, waited = map(sum, zip(*measured, strict=True))
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        if device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(device) / 2**20
        return {
            "seconds": sum(seconds for seconds, *_ in self.intervals),
            "images_per_second": images / seconds,
            "data_wait": waited / seconds,
            "peak_memory_mib": memory,
        }
