"""Law 10: the time of a step goes into work."""

import functools
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from ..event import Event
from ..job import Process
from ..law import NOTE, SLOW, Breach, Law, NotJudged, check
from ..moments import Moments, Step
from ..record import not_the_users, place, recorder, subscribe, wrap
from ..watcher import Watcher
from .files import Saved
from .meeting import hangs

LAW = Law(10, "time", "Time goes into work")
PARTS = "data forward backward communication optimizer validation saving".split()
LEAST = 0.05  # seconds: the steps of a job worth judging
SHARE = 0.05  # of a step: what a mend must win back
READS = "item cpu tolist numpy __bool__ __float__ __int__".split()  # wait for a GPU


@dataclass(kw_only=True)
class Spans(Event):
    """Where the time of a step went. On a GPU, these are the host's times."""

    watched: bool  # the step was recorded closely, which takes time
    wall: float  # seconds since the end of the last step
    queued: float  # seconds in which the process waited for a core
    spans: list[tuple[str, float, float]]  # part, start and end: seconds since 1970
    calls: dict[str, float]  # seconds in collectives, by line
    reads: dict[str, float]  # seconds in which the host read from the GPU, by line
    missing: int  # weights without a gradient


@dataclass(kw_only=True)
class Runs(Event):
    """A network runs for the first time."""

    limit: ClassVar[int] = 4
    network: str
    weights: int  # how many numbers
    device: str
    cores: int  # that this process may use


@dataclass(kw_only=True)
class Tracked(Event):
    """A network in evaluation mode runs with gradients."""

    limit: ClassVar[int] = 40
    network: str
    loader: int
    epoch: int
    place: str


@dataclass(kw_only=True)
class Buckets(Event):
    """How DistributedDataParallel was constructed."""

    limit: ClassVar[int] = 9
    search: bool  # for unused weights
    bucket: int  # bytes
    size: int  # bytes of all weights
    place: str


class Clock(Watcher):
    """Measures the parts of each step."""

    def __init__(self):
        self.known = set()
        self.ended, self.forward, self.back, self.stepping = None, 0.0, 0.0, 0.0
        self.waited, self.queue = 0.0, 0.0
        self.clear()

    def clear(self) -> None:
        self.spans, self.missing = [], 0
        self.calls, self.reads = Counter(), Counter()

    def hooks(self) -> None:
        import torch

        for name in READS:
            wrap(torch.Tensor, name, functools.partial(self.host_read, name))
        subscribe(Saved, lambda one: self.add("saving", one.seconds))

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
            self.learn(network, batch)

    def learn(self, network, batch) -> None:
        """Record a network's size, once, and whether it tracks gradients in vain."""
        inner = getattr(network, "_orig_mod", network)
        inner = getattr(inner, "module", inner)
        name = type(inner).__name__
        if batch and not network.training:
            which = {"loader": batch["loader"], "epoch": batch["epoch"]}
            if (name, *which.values()) not in self.known:
                self.known.add((name, *which.values()))
                recorder.write(Tracked(network=name, place=place(), **which))
        if name not in self.known and (weights := [*inner.parameters()]):
            self.known.add(name)
            cores = len(os.sched_getaffinity(0))
            count, device = sum(one.numel() for one in weights), weights[0].device.type
            one = Runs(network=name, weights=count, device=device, cores=cores)
            recorder.write(one)

    def on_wrap(self, model, place) -> None:
        size = sum(x.numel() * x.element_size() for x in model.module.parameters())
        bucket, search = model.bucket_bytes_cap, model.find_unused_parameters
        recorder.write(Buckets(search=search, bucket=bucket, size=size, place=place))

    def on_backward(self, root) -> None:
        self.back = Moments.here.last_gradient = time.perf_counter()

    def after_backward(self) -> None:
        now, last = time.perf_counter(), Moments.here.last_gradient
        last = last if last > self.back else now
        self.add("backward", last - self.back, now - last)
        self.add("communication", now - last)

    def after_collective(self, name, tensors, where, seconds) -> None:
        self.add("communication", seconds)
        self.waited += seconds
        self.calls[f"{name}() in {where}"] += seconds

    def on_step(self, optimizer, weights, gradients) -> None:
        self.stepping, self.waited = time.perf_counter(), 0.0
        self.missing = sum(not one for one in gradients)

    def after_step(self, optimizer, weights) -> None:
        now = time.perf_counter()
        self.add("optimizer", max(0.0, now - self.stepping - self.waited))
        queue = queued()
        one = Spans(
            watched=recorder.watching,
            wall=now - self.ended if self.ended else 0.0,
            queued=queue - self.queue,
            spans=self.spans[-200:],
            calls=dict(self.calls.most_common(9)),
            reads=dict(self.reads.most_common(9)),
            missing=self.missing,
        )
        recorder.write(one)
        self.clear()
        self.ended, self.queue = time.perf_counter(), queue

    def host_read(self, name: str, call, tensor, /, *args, **kwargs):
        if not (tensor.is_cuda and recorder.timing):
            return call(tensor, *args, **kwargs)
        began = time.perf_counter()
        result = call(tensor, *args, **kwargs)
        if not sys._getframe(2).f_code.co_filename.startswith(not_the_users()):
            where = f"{name.strip('_')}() in {place()}"
            self.reads[where] += time.perf_counter() - began
        return result


def queued() -> float:
    """Return for how many seconds this thread has waited for a core (Linux)."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


# --- what the steps show ---


def timed(process: Process) -> list[Spans]:
    """Return a process's steps: those that were only timed, or else the watched."""
    steps = [one for one in process.of(Spans) if one.wall]
    only = [one for one in steps if not one.watched]
    return only if len(only) > 4 else steps[5:]


def parts(one: Spans) -> dict[str, float]:
    """Return the seconds of a step's parts, with the rest."""
    found = dict.fromkeys(PARTS, 0.0)
    for part, start, end in one.spans:
        found[part] += end - start
    return found | {"rest": max(0.0, one.wall - sum(found.values()))}


def time_table(job) -> dict[int, dict[str, float]]:
    """Return each rank's seconds per step by part; {} if too few steps were seen."""
    table = {}
    for process in job.processes:
        rows = [parts(one) for one in timed(process)]
        if len(rows) < 5:
            return {}
        table[process.rank] = {
            part: sum(row[part] for row in rows) / len(rows) for part in rows[0]
        }
    return table


def walls(job) -> float:
    """Return a step's median seconds; raise NotJudged for short steps."""
    rows = [[one.wall for one in timed(process)] for process in job.processes]
    if min(map(len, rows), default=0) < 5:
        raise NotJudged("too few steps were seen: see --steps")
    wall = max(map(median, rows))
    if wall < LEAST:
        raise NotJudged(f"a step takes {1000 * wall:.1f} ms (judged from 50 ms)")
    return wall


@check(
    LAW,
    SLOW,
    general=True,
    needs=[Spans],
    causes=[hangs],
    read="docs/performance.md",
)
def bottleneck(job):
    """A part of a step takes time that a change would win back.

    Look at the part's line in the table below.
    """
    wall, found = walls(job), []
    steps = [timed(process) for process in job.processes]
    shares = {}
    for rank, rows in enumerate(steps):
        for part in ("data", "validation", "saving", "rest"):
            share = median(parts(one)[part] / one.wall for one in rows)
            shares[part] = max(shares.get(part, (0, 0)), (share, rank))
    mends = {
        "data": "Load in more processes (num_workers), or do less for each sample.",
        "validation": "Validate less often than in each step.",
        "saving": "Save less often than in each step.",
        "rest": "Look at what the loop does besides training: copies, prints, files.",
    }
    if any(one.watched for one in steps[0]):
        shares.pop("rest")  # of a watched step: doctor's own work
    slow = slowest(job, steps, wall)
    if slow:
        found.append((1.0, slow))
    for part, (share, rank) in shares.items():
        if share > 2 * SHARE and not slow:
            what = f"{part} is {share:.0%} of a step of {1000 * wall:.0f} ms on rank "
            found.append((share, Breach(f"{what}{rank}", mend=mends[part])))
    calls = sum((Counter(one.calls) for rows in steps for one in rows), Counter())
    total = sum(one.wall for rows in steps for one in rows)
    for call, seconds in calls.most_common(1):
        name, _, where = call.partition(" in ")
        if seconds > SHARE * total and name != "synchronize()" and not slow:
            what = f"{name} takes {seconds / total:.0%} of a step (communication)"
            mend = "Call it less often, or with less data."
            found.append((seconds / total, Breach(what, where, mend=mend)))
    for _, breach in sorted(found, key=lambda one: -one[0]):
        yield breach
    if not found:
        rest = ", ".join(f"{part} {share:.0%}" for part, (share, _) in shares.items())
        yield f"of {1000 * wall:.0f} ms per step, {rest}"


def slowest(job, steps: list[list[Spans]], wall: float) -> Breach | None:
    """Return a breach if one rank does more in nearly every step, and others wait."""
    if len(steps) < 2:
        return None
    rows = [[parts(one) for one in own] for own in steps]
    own = []  # without the time in which a loaded machine ran other processes
    for found in steps:
        waits = [parts(one)["communication"] + one.queued for one in found]
        own.append([x.wall - wait for x, wait in zip(found, waits, strict=True)])
    means = [median(one) for one in own]
    slow = means.index(max(means))
    others = [one for n, one in enumerate(means) if n != slow]
    columns = [*zip(*own, strict=False)]
    often = sum(column[slow] == max(column) for column in columns)
    gain = means[slow] - max(others)
    if gain < max(SHARE * wall, 0.2 * max(others)) or often < 0.8 * len(columns):
        return None
    names = [part for part in rows[0][0] if part != "communication"]
    each = {x: [median(row[x] for row in one) for one in rows] for x in names}
    more = {x: row[slow] - min(row) for x, row in each.items()}
    part = max(more, key=more.__getitem__)
    what = f"rank {job.processes[slow].rank} needs {1000 * means[slow]:.0f} ms for its "
    what += f"part of a step, and the others, which need {1000 * max(others):.0f} ms, "
    what += f"wait: its {part} takes {1000 * more[part]:.0f} ms longer"
    return Breach(what, mend=f"Find out what this rank does more in its {part}.")


@check(LAW, SLOW, needs=[Tracked], read="docs/pitfalls.md, number 17")
def validation_with_gradients(job):
    """Validation computes gradients, which take time and memory.

    Validate inside torch.no_grad() or torch.inference_mode().
    """
    stepped = {(one.rank, one.loader, one.epoch) for one in job.of(Step)}
    for one in job.of(Tracked):
        numbers = {process.training for process in job.processes}
        own = (one.rank, one.loader, one.epoch) in stepped
        if one.loader not in numbers and not own:
            what = f"rank {one.rank} validates {one.network} with gradients"
            yield Breach(what, one.place)
            return


@check(LAW, NOTE, needs=[Buckets, Spans], read="docs/pitfalls.md, number 10")
def unused_search(job):
    """DDP searches for unused weights where there are none.

    Leave out find_unused_parameters=True.
    """
    steps = [one for one in job.of(Spans) if one.watched]
    for one in job.of(Buckets)[:1]:
        if one.search and steps and not any(x.missing for x in steps):
            what = f"find_unused_parameters=True, but in {len(steps)} steps no weight "
            yield Breach(f"{what}is unused", one.place)


@check(LAW, NOTE, needs=[Buckets], read="docs/performance.md")
def small_buckets(job):
    """DDP's buckets are small, and so each step needs many all-reduces.

    Leave bucket_cap_mb at its default, 25.
    """
    for one in job.of(Buckets)[:1]:
        if one.bucket < 2**20 and one.size > 4 * one.bucket:
            count, mib = one.size // one.bucket, one.bucket / 2**20
            what = f"a step has about {count} all-reduces, in buckets of {mib:.2g} MiB"
            yield Breach(what, one.place)


@check(LAW, SLOW, needs=[Spans], read="docs/performance.md")
def host_syncs(job):
    """A line makes the host wait for the GPU in every step.

    Keep sums on the GPU, and read them only now and then.
    """
    if not any(one.device == "cuda" for one in job.of(Runs)):
        raise NotJudged("reading a tensor does not wait on a CPU")
    wall, steps = walls(job), timed(job.processes[0])
    seconds = sum((Counter(one.reads) for one in steps), Counter())
    often = [
        x for x in seconds if 2 * sum(x in one.reads for one in steps) > len(steps)
    ]
    busy = 1 - sum(seconds[x] for x in often) / sum(one.wall for one in steps)
    if often and busy > SHARE:
        where = often[0].rpartition(" in ")[2]
        what = f"{', '.join(often[:3])} waits for the GPU in most steps; then the GPU "
        what += f"waits for the host, at most {busy:.0%} of {1000 * wall:.0f} ms"
        yield Breach(what, where)


@check(LAW, SLOW, needs=[Spans, Runs], read="docs/performance.md")
def threads(job):
    """The processes start more compute threads than there are cores.

    Set OMP_NUM_THREADS to the number of cores divided by the number of processes.
    """
    walls(job)
    if any(one.device != "cpu" for one in job.of(Runs)):
        raise NotJudged("the job computes on GPUs")
    cores, count = job.of(Runs)[0].cores, job.of(Step)[0].threads
    if count * len(job.processes) > 1.5 * cores:
        what = f"{len(job.processes)} processes have {count} threads each"
        yield Breach(f"{what}, but there are {cores} cores")
