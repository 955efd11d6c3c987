"""Prints a run's progress, times its steps and writes report.json."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import torch
import torchvision
from tqdm import tqdm

from common.checkpoint import BEST_METRIC, TrainingState, replace_file
from common.data import PREFETCH
from common.device import describe, peak_memory_mib
from common.gate import VARIABLE, Gate

SECONDS_BETWEEN_LINES = 30  # if stderr is not a terminal, for example under Slurm
SMALL_BATCH = 16  # below it, batch norm's error grows: https://arxiv.org/abs/1803.08494


class Log:
    """Prints and times a run. Every process times its steps; rank 0 prints."""

    def __init__(
        self,
        args: Namespace,
        state: TrainingState,
        device: torch.device,
        rank: int,
        world_size: int,
        workers: int,
    ):
        """Store the run; `workers` is the number of this process's loader processes."""
        self.args = args
        self.state = state
        self.device = device
        self.rank = rank
        self.world_size = world_size
        path = os.environ.get(VARIABLE)  # set if benchmarks/timings measures this run
        self.gate = Gate(path, rank, world_size) if path else None
        self.line_at = 0.0  # the first interval of a run is shown immediately
        # The first steps are slow; the next ones use batches that were loaded meanwhile
        self.cold_steps = 1 if args.synthetic else max(1, PREFETCH * workers)

    def start(self, steps_per_epoch: int, batch_size: int) -> None:
        """Print a summary of the run; `batch_size` is this process's."""
        if self.rank != 0:
            return
        args, state = self.args, self.state
        data = "synthetic images"
        if not args.synthetic:
            data = f"{args.workers} loader processes ({args.decoder})"
        rate = state.optimizer.param_groups[0].get("initial_lr", 0)
        parts = args.accumulate
        micro = f" in {parts} micro-batches" if parts > 1 else ""
        plural = "" if self.world_size == 1 else "es"
        print(
            f"{args.strategy}: {self.world_size} process{plural} on "
            f"{describe(self.device)} ({self.device.type}), {state.arch} at "
            f"{args.image_size} px, {args.precision}, seed {args.seed}\n"
            f"{steps_per_epoch} steps per epoch, {args.global_batch_size} images per "
            f"step, {batch_size} per process{micro}, {data}, learning rate {rate:.4g}"
        )
        at_once = batch_size // parts
        if at_once < SMALL_BATCH and not args.evaluate:
            print(
                f"note: each process computes only {at_once} images at a time; below "
                f"{SMALL_BATCH}, batch norm loses accuracy and GPUs are partly idle: "
                "raise --global-batch-size, or start fewer processes"
            )
        if state.epoch >= args.epochs and not args.evaluate:
            print(f"already complete: {state.epoch} of {args.epochs} epochs")
        elif (state.epoch or state.step) and not args.evaluate:
            print(
                f"resumed in epoch {state.epoch + 1} after step {state.step} "
                f"(image {state.step * args.global_batch_size} of the epoch)"
            )
        sys.stdout.flush()

    def start_epoch(self, steps: int) -> None:
        """Start timing an epoch of `steps` steps, or the rest of a resumed one."""
        self.title = f"epoch {self.state.epoch + 1}/{self.args.epochs}"
        self.steps, self.step = steps, self.state.step
        self.first_step, self.warmup_steps, self.seconds = self.step, 0, 0.0
        self.intervals: list[tuple[float, int, int, float]] = []
        if self.line_at:
            self.line_at = time.monotonic() + SECONDS_BETWEEN_LINES
        self.bar = tqdm(
            total=steps,
            initial=self.step,
            desc=self.title,
            leave=False,
            disable=self.rank != 0 or not sys.stderr.isatty(),
        )
        self.began = time.perf_counter()

    def interval(self, step: int, recent: dict[str, float], wait: float) -> None:
        """End an interval at `step`; the device must have finished its work.

        `recent` has the interval's averages; the device waited `wait` seconds for data.
        """
        now = time.perf_counter()
        seconds, steps = now - self.began, step - self.step
        self.began, self.step = now, step
        self.seconds += seconds
        if self.cold_steps > 0:
            self.cold_steps -= steps
            self.warmup_steps += steps
        else:
            self.intervals.append((seconds, steps, recent["images"], wait))
        text = (
            f"{in_words(recent)}, {recent['images'] / seconds:.0f} images/s, "
            f"waited for data {wait / seconds:.0%}"
        )
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(steps)
        if self.rank == 0 and self.bar.disable and time.monotonic() > self.line_at:
            self.line_at = time.monotonic() + SECONDS_BETWEEN_LINES
            print(f"{self.title}, step {step}/{self.steps}: {text}", flush=True)
        if self.gate is not None:
            self.gate.wait(step, seconds, recent["images"], wait)
            self.began = time.perf_counter()

    def end_epoch(self) -> None:
        """Remove the progress bar."""
        self.bar.close()

    def figures(self) -> dict[str, float | int | None]:
        """The epoch's time and memory from `first_step` on; None if not measured.

        Speed and waits exclude the warm-up steps; `seconds` includes them. The time per
        step is the median of the intervals' means.
        """
        seconds = sum(interval[0] for interval in self.intervals)
        images = sum(interval[2] for interval in self.intervals)
        waited = sum(interval[3] for interval in self.intervals)
        per_step = [1000 * interval[0] / interval[1] for interval in self.intervals]
        return {
            "first_step": self.first_step,
            "seconds": self.seconds,
            "warmup_steps": self.warmup_steps,
            "images_per_second": images / seconds if seconds else None,
            "step_milliseconds": statistics.median(per_step) if per_step else None,
            "data_wait_share": waited / seconds if seconds else None,
            "peak_memory_mib": peak_memory_mib(self.device),
        }

    def epoch(self, record: dict) -> None:
        """Print a finished epoch's record on one line."""
        if self.rank != 0:
            return
        train, val = (
            {n.removeprefix(part): v for n, v in record.items() if n.startswith(part)}
            for part in ("train_", "val_")
        )
        text = (
            f"epoch {record['epoch'] + 1}/{self.args.epochs}: train {in_words(train)}; "
            f"val {in_words(val)}, {val['images']} images; {record['seconds']:.1f} s"
        )
        if record["first_step"]:
            text += f" from step {record['first_step']} on"
        if record["images_per_second"]:
            text += f", {record['images_per_second']:.0f} images/s"
            text += f", waited for data {record['data_wait_share']:.0%}"
        else:
            text += " (warm-up)"
        print(text, flush=True)

    def validation(self, val: dict[str, float]) -> None:
        """Print the result of --evaluate."""
        if self.rank == 0:
            print(f"val {in_words(val)}, {val['images']} images", flush=True)

    def write_report(self) -> None:
        """Write report.json: the run's command, machine, versions and figures."""
        args, cuda = self.args, self.device.type == "cuda"
        report = {
            "strategy": args.strategy,
            "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "commit": commit(),
            "world_size": self.world_size,
            "device": self.device.type,
            "device_name": describe(self.device),
            "cpu_cores": os.cpu_count(),
            "threads_per_process": torch.get_num_threads(),
            "precision": args.precision,
            "arch": self.state.arch,
            "global_batch_size": args.global_batch_size,
            "workers": args.workers,
            "decoder": None if args.synthetic else args.decoder,
            "seed": args.seed,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
            "cuda": torch.version.cuda if cuda else None,
            **summarise(self.state.records),
        }
        text = json.dumps(report, indent=2, default=str) + "\n"
        path = Path(args.output, "report.json")
        replace_file(path, lambda file: file.write(text.encode()))


def in_words(averages: dict[str, float]) -> str:
    """Format averages: "loss 1.2345, top-1 50.00 %, top-5 75.00 %"."""
    words = []
    for name, value in averages.items():
        if name in ("top1", "top5"):
            words.append(f"top-{name[3:]} {value:.2f} %")
        elif name not in ("images", "stop"):
            words.append(f"{name} {value:.4f}")
    return ", ".join(words)


def commit() -> str | None:
    """The commit, with -dirty if there are uncommitted changes; None outside git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        here = Path(__file__).parent
        found = subprocess.run(command, cwd=here, capture_output=True, text=True)
    except OSError:
        return None
    return found.stdout.strip() or None


def summarise(records: list[dict]) -> dict:
    """Medians over all epochs except the first, which includes start-up and warm-up.

    Epochs that were resumed midway are also excluded.
    """
    later = [one for one in records[1:] if not one.get("first_step")] or records
    measured = ("seconds", "images_per_second", "step_milliseconds", "data_wait_share")
    summary: dict = {"epochs": len(records)}
    for name in measured:
        values = [record[name] for record in later if record[name] is not None]
        summary[name] = statistics.median(values) if values else None
    metrics = [record[BEST_METRIC] for record in records]
    summary[BEST_METRIC] = metrics[-1] if metrics else None
    summary[f"best_{BEST_METRIC}"] = max(metrics, default=None)
    return summary
