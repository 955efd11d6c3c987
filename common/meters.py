"""Loss and accuracy as sums on the device, and how long an epoch took."""

import math
import statistics
import time
from typing import NamedTuple

import torch
from torch import Tensor

from common.device import peak_memory_mib
from common.launch import Watchdog


class Averages(NamedTuple):
    """What sums over images come to."""

    loss: float
    top1: float  # percent
    top5: float  # percent
    images: int
    stop: bool = False  # whether any process was asked to stop


class Meter:
    """Adds up loss, hits and images on the device, which nobody waits for.

    The sums are (5,) float64: loss times images, top-1 hits, top-5 hits, images, and
    the number of processes that were asked to stop, which travels in the same
    all-reduce. The watchdog hears of every batch.
    """

    def __init__(self, device: torch.device, watchdog: Watchdog | None = None):
        self.watchdog = watchdog
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)

    def add(self, loss: Tensor, outputs: Tensor, labels: Tensor) -> None:
        """Add one batch: its mean loss, (B, classes) outputs and (B,) labels."""
        best = outputs.detach().topk(min(5, outputs.size(1)), dim=1).indices
        hits = best == labels.unsqueeze(1)
        self.sums[0] += loss.detach().double() * len(labels)
        self.sums[1] += hits[:, 0].sum()
        self.sums[2] += hits.sum()
        self.sums[3] += len(labels)
        if self.watchdog is not None:
            self.watchdog.feed()

    def take(self) -> Tensor:
        """Hand out the sums since the last call."""
        if self.watchdog is not None:
            self.sums[4] = self.watchdog.stop_requested
        taken = self.sums.clone()
        self.sums.zero_()
        return taken


def averages(sums: Tensor) -> Averages:
    """Divide sums of a Meter, already added up over all processes, by their images."""
    loss, top1, top5, images, stops = sums.tolist()
    if not images:
        return Averages(math.nan, math.nan, math.nan, 0, stops > 0)
    shares = loss / images, 100 * top1 / images, 100 * top5 / images
    return Averages(*shares, int(images), stops > 0)


def percentile(values: list[float], share: float) -> float:
    """The smallest of the values that no more than 1 - `share` of them exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


class EpochTimer:
    """Times the laps between two moments at which the device has caught up.

    The first laps of a process are its warm-up: one, as first steps are slow, and more
    while batches are used up that loaders prepared meanwhile. Only `seconds` has them;
    `images_per_second`, `step_milliseconds` and `data_wait_share` leave them out.
    """

    def __init__(self, warmup_steps: int = 1):
        """Time nothing before `warmup_steps` steps, and the lap that they end in."""
        self.cold_steps = warmup_steps

    def start(self, step: int) -> None:
        """Begin an epoch, `step` steps of which are done already."""
        self.lap_began, self.lap_step = time.perf_counter(), step
        self.first_step = step
        self.seconds = 0.0
        self.warmup_steps = 0
        self.laps: list[tuple[float, int, int, float]] = []

    def lap(self, step: int, images: int, wait_seconds: float) -> tuple[float, float]:
        """End a lap at `step`; returns its images per second and share of waiting."""
        now = time.perf_counter()
        seconds, steps = now - self.lap_began, step - self.lap_step
        self.lap_began, self.lap_step = now, step
        self.seconds += seconds
        if self.cold_steps > 0:
            self.cold_steps -= steps
            self.warmup_steps += steps
        else:
            self.laps.append((seconds, steps, images, wait_seconds))
        return images / seconds, wait_seconds / seconds

    def summary(self, device: torch.device) -> dict[str, float | int | None]:
        """Figures of the epoch from `first_step` on; None where all was warm-up.

        The two of a step are the median and the 90th percentile over laps, of each the
        mean of its steps.
        """
        seconds = sum(lap[0] for lap in self.laps)
        images = sum(lap[2] for lap in self.laps)
        per_step = [1000 * lap[0] / lap[1] for lap in self.laps]
        return {
            "first_step": self.first_step,
            "seconds": self.seconds,
            "warmup_steps": self.warmup_steps,
            "images_per_second": images / seconds if seconds else None,
            "step_milliseconds": statistics.median(per_step) if per_step else None,
            "step_milliseconds_p90": percentile(per_step, 0.9) if per_step else None,
            "data_wait_share": sum(lap[3] for lap in self.laps) / seconds
            if seconds
            else None,
            "peak_memory_mib": peak_memory_mib(device),
        }
