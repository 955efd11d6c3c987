"""What rank 0 shows while it trains, and how long an epoch took."""

import sys
import time
from argparse import Namespace

import torch
from tqdm import tqdm

from launch.limits import PREFETCH
from common.meters import Averages, EpochTimer

SECONDS_BETWEEN_LINES = 30  # where there is no terminal, as under Slurm


class Progress:
    """A bar over the steps of an epoch on a terminal, a line now and then elsewhere."""

    def __init__(self, args: Namespace, rank: int):
        self.rank = rank
        self.epochs = args.epochs
        self.line_at = 0.0  # the first lap of a run is shown at once
        workers = 0 if args.synthetic else args.per_process_workers
        self.timer = EpochTimer(max(1, PREFETCH * workers))

    def start(self, epoch: int, step: int, steps: int) -> None:
        """Begin an epoch of `steps` steps, of which `step` are done already."""
        self.title = f"epoch {epoch + 1}/{self.epochs}"
        self.step, self.steps = step, steps
        if self.line_at:
            self.line_at = time.monotonic() + SECONDS_BETWEEN_LINES
        self.bar = tqdm(
            total=steps,
            initial=step,
            desc=self.title,
            leave=False,
            disable=self.rank != 0 or not sys.stderr.isatty(),
        )
        self.timer.start(step)

    def lap(self, step: int, recent: Averages, wait_seconds: float) -> None:
        """Show the steps since the last call, which waited `wait_seconds` for data."""
        speed, wait = self.timer.lap(step, recent.images, wait_seconds)
        text = (
            f"loss {recent.loss:.3f}, top-1 {recent.top1:.1f} %, {speed:.0f} images/s, "
            f"waited for data {wait:.0%}"
        )
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(step - self.step)
        self.step = step
        quiet = self.rank != 0 or not self.bar.disable
        if not quiet and time.monotonic() > self.line_at:
            self.line_at = time.monotonic() + SECONDS_BETWEEN_LINES
            print(f"{self.title}, step {step}/{self.steps}: {text}", flush=True)

    def close(self) -> None:
        """Take the bar away."""
        self.bar.close()

    def figures(self, device: torch.device) -> dict[str, float | int | None]:
        """Seconds, speed and memory of the epoch, for its record."""
        return self.timer.summary(device)
