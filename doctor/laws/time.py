"""Law 10: a step spends its time on useful work."""

import time
from collections import Counter, defaultdict, deque
from statistics import fmean, median

from ..event import Event, Exit
from ..job import Process
from ..law import SLOW, Breach, Law, check, need
from ..moments import Moments, Wraps
from ..record import STEPS, TIMED, recorder, torch, wrap
from ..watcher import Watcher
from .gradient import not_averaged
from .meeting import hangs
from .passes import Update

LAW = Law(10, "time", "Time is spent on useful work")
LEAST = 0.05  # seconds: doctor does not judge shorter steps
SHARE = 0.05  # minimum share of a step that a fix must save
MENDS = {
    "data": "Load data in more processes (num_workers), or do less for each sample.",
    "validation": "Validate less often than in each step.",
    "saving": "Save less often than in each step.",
    "other code": "Look at what the loop does besides training: copies, prints, files.",
}
PARTS = "data forward backward communication optimizer validation saving".split()


class Spans(Event):
    """The time that each part of a step took. On a GPU, this is the host's time."""

    watched: bool  # doctor watched the step, which made it slower
    wall: float  # seconds since the end of the previous step
    queued: float  # seconds in which the process waited for a core
    spans: list[tuple[str, float, float]]  # part, start and end: seconds since 1970
    calls: dict[str, float]  # line -> seconds in collectives
    size: int = 0  # number of elements of the training networks' inputs


class Runs(Event, limit=4):
    """A network runs for the first time."""

    network: str
    weights: int  # number of elements
    device: str


class Clock(Watcher):
    """Measures how long each part of a step takes."""

    def __init__(self):
        self.known = set()
        self.ended = self.forward = self.back = self.stepping = 0.0
        self.waited = self.queue = self.size = 0
        self.spans, self.calls = deque(maxlen=200), Counter()
        self.averages = False  # a backward pass of this step has ended

    def hooks(self) -> None:
        wrap(torch, "save", self.save)

    def add(self, part: str, seconds: float, ago: float = 0) -> None:
        """Add a span of `seconds` that ended `ago` seconds ago."""
        if recorder.timing and seconds:
            end = time.time() - ago
            self.spans.append((part, end - seconds, end))

    def on_batch(self, epoch, batch, seconds) -> None:
        self.add("data" if torch.is_grad_enabled() else "validation", seconds)

    def on_input(self, network, inputs) -> None:
        self.forward = time.perf_counter()
        if torch.is_grad_enabled():
            self.size += sum(one.numel() for one in inputs)

    def on_output(self, network, outputs, batch) -> None:
        bare = not (network.training or torch.is_grad_enabled())
        known, own = Moments.here.known, network.parameters() if bare else ()
        part = "validation" if any(id(x) in known for x in own) else "forward"
        self.add(part, time.perf_counter() - self.forward)
        inner = getattr(network, "_orig_mod", network)
        inner = getattr(inner, "module", inner)
        name = type(inner).__name__
        new = torch.is_grad_enabled() and name not in self.known
        if new and not Moments.here.backing and (weights := [*inner.parameters()]):
            self.known.add(name)
            count, device = sum(one.numel() for one in weights), weights[0].device.type
            recorder.write(Runs(network=name, weights=count, device=device))

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
        queue, wall = queued(), now - self.ended if self.ended else 0.0
        own = {"spans": [*self.spans], "calls": dict(self.calls.most_common(9))}
        own |= {"watched": recorder.watching, "queued": queue - self.queue}
        recorder.write(Spans(wall=wall, size=self.size, **own))
        self.spans.clear()
        self.calls.clear()
        self.averages, self.size = False, 0
        self.ended, self.queue = time.perf_counter(), queue
        if recorder.step + 1 == STEPS + TIMED:
            recorder.sign("seen")


def queued() -> float:
    """Return how many seconds this thread has waited for a core (Linux)."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def timed(process: Process) -> list[Spans]:
    """Return the steps that were only timed or, if few were, all but the first five."""
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
    ranks = {one.rank: [*map(parts, timed(one))] for one in job.processes}
    enough = min(map(len, ranks.values()), default=0) > 4
    return {
        rank: {part: fmean(row[part] for row in rows) for part in rows[0]}
        for rank, rows in (ranks.items() if enough else ())
    }


def walls(job) -> float:
    """Return a step's median duration in seconds; raise NotJudged for short steps."""
    need(not job.emulated, "--cpu emulated the GPUs: times on real GPUs would differ")
    rows = [[one.wall for one in timed(process)] for process in job.processes]
    need(min(map(len, rows), default=0) > 4, "too few steps were seen: see --steps")
    wall = max(map(median, rows))
    need(wall >= LEAST, f"a median step takes {1000 * wall:.1f} ms, less than 50 ms")
    return wall


@check(LAW, SLOW, causes=[not_averaged], read="lesson 7")
def every_micro_batch(job):
    """DDP averages gradients in each pass of a step.

    Use model.no_sync() in all passes of a step except the last.
    """
    need(job.of(Wraps), "DDP is not used")
    for row in job.rows(Update):
        passes = row[0].passes
        forwards = [one["forwards"][-1] for one in passes if one["forwards"]]
        places, count = {one["place"] for one in passes}, len(passes)
        if sum(forwards) >= count > 1 == len(places):
            yield Breach(f"DDP averages {count} times per step", passes[0]["place"])
            return


FIRST = hangs, every_micro_batch  # the report names their findings first


@check(LAW, SLOW, general=True, needs=[Spans], causes=FIRST, read="docs/measure.md")
def bottleneck(job):
    """A part of a step takes time that a change could save.

    Look at the last lines of the report, which show how long each part takes.
    """
    wall, steps = walls(job), [timed(process) for process in job.processes]
    need(any([x.passes for x in job.of(Exit)] or [1]), "no backward pass was seen")
    if slow := slowest(steps, wall):
        yield slow
        return
    shares, costs, found = {}, defaultdict(list), []
    for rank, rows in enumerate(steps):
        for part in ("data", "validation", "saving", "other code"):
            share = median(parts(one)[part] / one.wall for one in rows)
            shares[part] = max(shares.get(part, (0, 0)), (share, rank))
    if any(one.watched for one in steps[0]):
        shares.pop("other code")  # it includes doctor's own work
    for part, (share, rank) in shares.items():
        if share > (0.5 if part == "other code" else 2 * SHARE):
            what = f"{part} takes {share:.0%} of a {1000 * wall:.0f} ms step on rank "
            found.append(Breach(f"{what}{rank}", mend=MENDS[part]))
    columns = [*zip(*steps, strict=False)]
    for column in columns:
        for call in column[0].calls:  # the last rank to arrive does not wait
            costs[call].append(min(one.calls.get(call, 0) for one in column))
    # Without the step where it takes longest: a first call connects the processes
    costs = {call: sum(own) - max(own) for call, own in costs.items()}
    for call, seconds in Counter(costs).most_common(1):
        name, _, where = call.partition(" in ")
        share = seconds / sum(column[0].wall for column in columns)
        if share > 4 * SHARE:  # a right script may have to sum a number in each step
            what = f"{name} takes {share:.0%} of a step (communication)"
            mend = "Call this collective less often, or with less data."
            found.append(Breach(what, where, mend=mend))
    rest = ", ".join(f"{part} {share:.0%}" for part, (share, _) in shares.items())
    yield from found or [f"a median step takes {1000 * wall:.0f} ms: {rest}"]


def slowest(steps: list[list[Spans]], wall: float) -> Breach | None:
    """Return a breach if one rank makes the others wait for it in nearly all steps."""
    rows = [[(x, parts(x)) for x in own] for own in steps]
    # The seconds that a rank works: it does not wait for other ranks or for a core
    works = [[x.wall - y["communication"] - x.queued for x, y in own] for own in rows]
    medians = [median(own) for own in works]
    most, slow = max((x, n) for n, x in enumerate(medians))
    others = max([x for n, x in enumerate(medians) if n != slow], default=most)
    columns, gain = [*zip(*works, strict=False)], most - others
    often = sum(column[slow] == max(column) for column in columns)
    # If a rank waited for a core in collectives, the machine is busy
    busy = min(medians) < 0 or often < max(8, 0.8 * len(columns))
    if busy or gain < max(SHARE * wall, 0.2 * others):
        return None
    more = {}
    for part in (*PARTS, "other code"):
        each = [median(y[part] for _, y in own) for own in rows]
        more[part] = (each[slow] - min(each)) * (part != "communication")
    *_, second, part = sorted(more, key=more.__getitem__)
    extra = more[part]
    if extra < 0.5 * gain:  # such as a forward pass and its backward pass
        part, extra = f"{second} and {part}", extra + more[second]
    if extra < 0.5 * gain:
        return None
    what = f"rank {slow} needs {1000 * most:.0f} ms per step, the others at most "
    what += f"{1000 * others:.0f} ms; {1000 * extra:.0f} ms more for its {part}"
    return Breach(what, mend=f"Find out what extra work this rank does in its {part}.")
