"""What rank 0 shows while it trains."""

import sys
import time

from tqdm import tqdm

from common.meters import Averages

SECONDS_BETWEEN_LINES = 30  # where there is no terminal, as under Slurm


class Progress:
    """A bar over the steps of an epoch; in a log file, a line now and then."""

    def __init__(self, epoch: int, epochs: int, step: int, steps: int, rank: int):
        self.rank = rank
        self.title = f"epoch {epoch + 1}/{epochs}"
        self.step, self.steps = step, steps
        self.line_at = time.monotonic() + SECONDS_BETWEEN_LINES
        self.bar = None
        if rank == 0 and sys.stderr.isatty():
            self.bar = tqdm(total=steps, initial=step, desc=self.title, leave=False)

    def update(
        self, step: int, recent: Averages, images_per_second: float, wait: float
    ) -> None:
        """Show how the steps since the last call went; `wait` is the share spent on waiting."""
        text = (
            f"loss {recent.loss:.3f}, top-1 {recent.top1:.1f} %, "
            f"{images_per_second:.0f} images/s, waited for data {wait:.0%}"
        )
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(step - self.step)
        elif self.rank == 0 and time.monotonic() > self.line_at:
            print(
                f"{self.title}, step {step}/{self.steps}: {text}",
                file=sys.stderr,
                flush=True,
            )
            self.line_at = time.monotonic() + SECONDS_BETWEEN_LINES
        self.step = step

    def close(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.close()
