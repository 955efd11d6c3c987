"""Measure the parts of each step's time in the job's processes."""

import os
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import ClassVar

from .event import Event
from .job import Process
from .moments import Moments
from .record import recorder, wrap
from .watcher import Watcher

PARTS = "data forward backward communication optimizer validation saving".split()


@dataclass(kw_only=True)
class Spans(Event):
    """The time that each part of a step took. On a GPU, this is the host's time."""

    watched: bool  # doctor watched the step, which made it slower
    wall: float  # seconds since the end of the previous step
    queued: float  # seconds in which the process waited for a core
    spans: list[tuple[str, float, float]]  # part, start and end: seconds since 1970
    calls: dict[str, float]  # line -> seconds in collectives


@dataclass(kw_only=True)
class Runs(Event):
    """A network runs for the first time."""

    limit: ClassVar[int] = 4
    network: str
    weights: int  # number of elements
    device: str
    cores: int  # number of cores that this process may use


class Clock(Watcher):
    """Measures the parts of each step."""

    def __init__(self):
        self.known = set()
        self.ended, self.forward, self.back, self.stepping = None, 0.0, 0.0, 0.0
        self.waited, self.queue = 0.0, 0.0
        self.clear()

    def clear(self) -> None:
        self.spans, self.averages = deque(maxlen=200), False
        self.calls = Counter()

    def hooks(self) -> None:
        import torch

        wrap(torch, "save", self.save)

    def add(self, part: str, seconds: float, ago: float = 0) -> None:
        """Add a span that ends now, or ended some seconds ago."""
        if recorder.timing and seconds:
            end = time.time() - ago
            self.spans.append((part, end - seconds, end))

    def on_batch(self, epoch, batch, seconds) -> None:
        import torch

        self.add("data" if torch.is_grad_enabled() else "validation", seconds)

    def on_input(self, network, inputs) -> None:
        self.forward = time.perf_counter()

    def on_output(self, network, outputs, batch) -> None:
        import torch

        part = "forward" if torch.is_grad_enabled() else "validation"
        self.add(part, time.perf_counter() - self.forward)
        if torch.is_grad_enabled():
            self.learn(network)

    def learn(self, network) -> None:
        """Record a network's size on its first call."""
        inner = getattr(network, "_orig_mod", network)
        inner = getattr(inner, "module", inner)
        name = type(inner).__name__
        if name not in self.known and (weights := [*inner.parameters()]):
            self.known.add(name)
            cores = len(os.sched_getaffinity(0))
            count, device = sum(one.numel() for one in weights), weights[0].device.type
            one = Runs(network=name, weights=count, device=device, cores=cores)
            recorder.write(one)

    def on_backward(self, root) -> None:
        self.back = Moments.here.last_gradient = time.perf_counter()

    def after_backward(self) -> None:
        now, last = time.perf_counter(), Moments.here.last_gradient
        last = last if last > self.back else now
        self.add("backward", last - self.back, now - last)
        self.add("communication", now - last)
        self.averages = True

    def after_collective(self, name, tensors, where, seconds) -> None:
        self.add("communication", seconds)
        self.waited += seconds
        averages = self.averages and "object" not in name
        if not averages and not Moments.here.depth:  # else FSDP may call it
            self.calls[f"{name}() in {where}"] += seconds

    def save(self, call, *args, **kwargs):
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            self.add("saving", time.perf_counter() - began)

    def on_step(self, optimizer, weights, gradients) -> None:
        self.stepping, self.waited = time.perf_counter(), 0.0

    def after_step(self, optimizer, weights) -> None:
        now = time.perf_counter()
        self.add("optimizer", max(0.0, now - self.stepping - self.waited))
        queue = queued()
        one = Spans(
            watched=recorder.watching,
            wall=now - self.ended if self.ended else 0.0,
            queued=queue - self.queue,
            spans=[*self.spans],
            calls=dict(self.calls.most_common(9)),
        )
        recorder.write(one)
        self.clear()
        self.ended, self.queue = time.perf_counter(), queue


def queued() -> float:
    """Return for how many seconds this thread has waited for a core (Linux)."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


# --- what the steps show ---


def timed(process: Process) -> list[Spans]:
    """Return a process's steps that were only timed or, if there are none, watched."""
    steps = [one for one in process.of(Spans) if one.wall]
    only = [one for one in steps if not one.watched]
    return only if len(only) > 4 else steps[5:]


def parts(one: Spans) -> dict[str, float]:
    """Return the seconds of a step's parts, and of the remaining time."""
    found = dict.fromkeys(PARTS, 0.0)
    for part, start, end in one.spans:
        found[part] += end - start
    return found | {"other code": max(0.0, one.wall - sum(found.values()))}


def time_table(job) -> dict[int, dict[str, float]]:
    """Return each rank's seconds per step by part, or {} if there are too few steps."""
    table = {}
    for process in job.processes:
        rows = [parts(one) for one in timed(process)]
        if len(rows) < 5:
            return {}
        means = {x: sum(row[x] for row in rows) / len(rows) for x in rows[0]}
        table[process.rank] = means
    return table
