"""Meters for loss, accuracy and time, and what a run prints about them."""

import resource
import threading
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from tqdm import tqdm

from common.data import DeviceLoader
from common.errors import UserError

AllReduce = Callable[[Tensor], Tensor]  # sums a tensor over all processes
Sums = dict[str, Tensor | float]  # name -> sum
Metrics = dict[str, float | list]  # name -> value; a list has a value per class
# Formats of printed metrics; epochs.jsonl contains all digits of all metrics
FORMATS = {"top1": "top-1 {:.2f} %", "top5": "top-5 {:.2f} %", "images": "{:,} images"}
SHOWN = ("loss", "top1")  # metrics to print during an epoch
LOG_SECONDS = 30  # seconds between log lines, which replace a terminal's bar
tqdm.monitor_interval = 0  # no monitor thread, and no lock between processes
tqdm.set_lock(threading.RLock())


class Meter:
    """Adds up named numbers on the device; the host waits only in reduce()."""

    def __init__(self):
        self.sums: Sums = {}

    def add(self, sums: Sums) -> None:
        """Add a batch's sums, which may be numbers or tensors of any shape."""
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0) + value

    def reduce(self, all_reduce: AllReduce) -> dict[str, Tensor]:
        """Return float64 sums over all processes since the last call, on the CPU."""
        sums, self.sums = self.sums, {}
        options = {"dtype": torch.float64, "device": sums["loss"].device}
        tensors = [torch.as_tensor(value, **options) for value in sums.values()]
        flat = all_reduce(torch.cat([one.flatten() for one in tensors]))
        # cpu() would return float32 under Apex's O1
        pieces = flat.to("cpu").split([one.numel() for one in tensors])
        pairs = zip(sums, pieces, tensors, strict=True)
        return {name: piece.view(one.shape) for name, piece, one in pairs}


def batch_sums(loss: Tensor, outputs: Tensor, labels: Tensor) -> Sums:
    """Return one batch's sums: loss, 100 times the top-1 and top-5 hits, and images.

    `loss` is the batch's mean, `outputs` are (B, classes) and `labels` (B,) int64. To
    add a metric, add its name and its sum over the batch. Raises UserError if an image
    does not have exactly one class number as its label.
    """
    if labels.shape != outputs.shape[:1] or labels.is_floating_point():
        raise UserError(
            "batch_sums() in common/meters.py counts images with one class number "
            f"each: change it for labels {tuple(labels.shape)} of {labels.dtype}"
        )
    best = outputs.detach().topk(min(5, outputs.size(1)), dim=1).indices
    hits = best == labels.unsqueeze(1)
    return {
        "loss": loss.detach().double() * len(labels),
        "top1": 100 * hits[:, 0].sum(),
        "top5": 100 * hits.sum(),
        "images": len(labels),
    }


def averages(sums: dict[str, Tensor]) -> Metrics:
    """Divide all sums except "images" by the number of images.

    Here, also compute metrics that are ratios of two sums. For precision, with
    "right" and "found": `means["precision"] = (sums["right"] / sums["found"]).item()`.
    """
    means = {name: (value / sums["images"]).tolist() for name, value in sums.items()}
    return {**means, "images": int(sums["images"])}


def metric_names(classes: int) -> list[str]:
    """Return the names of all metrics, by calling batch_sums() for a dummy batch."""
    outputs, labels = torch.zeros(1, classes), torch.zeros(1, dtype=torch.int64)
    sums = batch_sums(torch.zeros(()), outputs, labels)
    return [*averages({name: torch.as_tensor(one) for name, one in sums.items()})]


def format_metrics(
    means: Metrics, names: Iterable[str] = SHOWN, prefix: str = ""
) -> str:
    """Format metrics, except lists: "loss 1.235, top-1 50.00 %"."""
    found = {name: means[prefix + name] for name in names if prefix + name in means}
    return ", ".join(
        FORMATS.get(name, f"{name} {{:.4g}}").format(value)
        for name, value in found.items()
        if not isinstance(value, list)
    )


def peak_memory_mib(device: torch.device) -> float:
    """Return the peak memory allocated on a GPU, or else this process's peak RSS."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


class Progress(tqdm):
    """Iterates over a loader and measures its speed; rank 0 shows the progress.

    On a terminal, tqdm draws a bar. Otherwise, show_interval() prints a line for the
    first and last intervals, and at most one line per LOG_SECONDS in between.
    """

    def __init__(self, title: str, loader: DeviceLoader, done: int = 0):
        """`loader` yields the batches of the steps that follow `done` earlier steps."""
        self.title, self.loader, self.done = title, loader, done
        self.steps, self.log_at = len(loader), 0.0
        self.intervals: list[tuple[float, int, float]] = []  # seconds, images, wait
        self.began, self.waited = time.perf_counter(), 0.0
        super().__init__(
            loader,
            title,
            self.steps,
            initial=done,
            leave=False,
            nrows=20,  # some terminals report 0; tqdm would then draw nothing
            bar_format="{desc} |{bar}| ETA {remaining}{postfix}",
            disable=None if loader.rank == 0 else True,  # None: only on a terminal
        )

    def show_interval(self, step: int, means: Metrics, learning_rate: float) -> None:
        """End a print interval, whose last step the device has finished.

        `means` are over all processes' images. Only the host's wait for data counts.
        """
        now, images = time.perf_counter(), means["images"]
        seconds, waited = now - self.began, self.loader.waited - self.waited
        self.intervals.append((seconds, images, waited))
        self.began, self.waited = now, self.loader.waited
        text = f"{format_metrics(means)}, {images / seconds:.0f} images/s"
        wait = f"wait {waited / seconds:.0%}"
        self.set_postfix_str(f"{text}, {wait}", refresh=False)
        log = self.disable and self.loader.rank == 0
        if log and (now > self.log_at or step == self.steps):
            self.log_at = now + LOG_SECONDS
            memory = f"{peak_memory_mib(self.loader.device):,.0f} MiB"
            seconds = self.epoch_stats()["seconds"] / (step - self.done)
            eta = tqdm.format_interval(seconds * (self.steps - step))
            text += f", data {wait}, lr {learning_rate:.3g}, {memory}, ETA {eta}"
            print(f"{self.title}, step {step}/{self.steps}: {text}", flush=True)

    def epoch_stats(self) -> Metrics:
        """Return an epoch's time, speed and data-wait share, and the run's peak memory.

        The speed and the share omit the first interval, in which loader processes and
        compilers start, and caches fill.
        """
        measured = self.intervals[1:] or self.intervals
        seconds, images, waited = map(sum, zip(*measured, strict=True))
        return {
            "seconds": sum(seconds for seconds, *_ in self.intervals),
            "images_per_second": images / seconds,
            "data_wait": waited / seconds,
            "peak_memory_mib": peak_memory_mib(self.loader.device),
        }
