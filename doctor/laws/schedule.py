"""Laws 4 and 6: learning rates are equal and fit the training."""

import weakref
from contextlib import suppress
from itertools import pairwise

from ..event import Event, Exit
from ..law import RISK, WRONG, Breach, check, need, several
from ..loaders import EpochEnd
from ..moments import Step, Wraps
from ..record import place, recorder, torch, wrap
from ..watcher import Watcher
from .alive import LAW as LEARNS
from .meeting import Call, one_network
from .passes import Update
from .replicas import LAW, alike, weights_drift

RESUMED = "load_state_dict() restores the old length. Repeat the steps taken instead."


class Schedule(Event):
    """The state of a learning-rate scheduler at the end of the job."""

    type: str
    planned: int | None  # the schedule's length in steps
    made: int | None  # its length before any load_state_dict()
    taken: int  # number of the scheduler's steps
    place: str  # the line that created the scheduler


class Plateau(Event, limit=200):
    """The script has passed a metric to ReduceLROnPlateau."""

    value: float
    place: str


class Schedules(Watcher):
    """Records learning-rate schedulers and their steps."""

    def __init__(self):
        self.made = []

    def hooks(self) -> None:
        schedulers = torch.optim.lr_scheduler
        wrap(schedulers.LRScheduler, "__init__", self.create)
        wrap(schedulers.ReduceLROnPlateau, "__init__", self.create)
        wrap(schedulers.ReduceLROnPlateau, "step", self.plateau)

    def create(self, call, scheduler, *args, **kwargs):
        if all(known() is not scheduler for known, *_ in self.made):
            self.made.append((weakref.ref(scheduler), place(), length(scheduler)))
        return call(scheduler, *args, **kwargs)

    def plateau(self, call, scheduler, metrics, *args, **kwargs):
        recorder.write(Plateau(value=float(metrics), place=place()))
        return call(scheduler, metrics, *args, **kwargs)

    def on_end(self) -> None:
        # A script that resumes makes its scheduler again in the same line
        latest = {}
        for known, where, made in self.made:
            one = known()
            taken = getattr(one, "last_epoch", 0)
            if one is None or taken > 0 or where not in latest:
                latest[where] = one, made
        for where, (one, made) in latest.items():
            if one is not None:
                own = {"type": type(one).__name__, "planned": length(one), "made": made}
                taken = int(getattr(one, "last_epoch", 0))
                recorder.write(Schedule(taken=taken, place=where, **own))


def length(scheduler) -> int | None:
    """Return a schedule's length in steps; for LambdaLR, the end of its first decay."""
    for factor in getattr(scheduler, "lr_lambdas", [])[:1]:
        with suppress(Exception):  # the user's function
            rates = [max(0, factor(n)) for n in range(9 * scheduler.last_epoch)]
            top = next(n for n, (a, b) in enumerate(pairwise(rates)) if b < a)
            least = min(rates[top:]) + 1e-9 * rates[top]
            end = next(n for n in range(top, len(rates)) if rates[n] <= least)
            falls = rates[end - 2] > rates[end - 1] > least  # not one large step
            again = max(rates[end : end + 2]) > 0.5 * rates[top]  # a warm restart
            return end if falls and end < len(rates) - 1 and not again else None
        return None
    return getattr(scheduler, "T_max", getattr(scheduler, "total_steps", None))


@check(LAW, WRONG, effects=[weights_drift], read="pitfall 11")
def learning_rates_differ(job):
    """The ranks have different learning rates.

    Step the scheduler equally often on every rank, with the metric's mean over ranks.
    """
    rows = zip(*(process.of(Plateau) for process in job.processes), strict=False)
    for row in rows:
        if not alike([[one.value] for one in row], 1e-6):
            values = ", ".join(f"{one.value:.4g}" for one in row)
            what = f"the ranks give ReduceLROnPlateau different metrics: {values}"
            yield Breach(what, row[0].place)
            return
    one_network(job)
    calls = zip(*([x.step for x in p.of(Call)] for p in job.processes), strict=False)
    uneven = not job.of(Wraps) and any(len({*row}) > 1 for row in calls)
    need(not uneven, "between two collectives, the ranks take unequally many steps")
    apart = set()  # steps of ranks whose GradScalers have skipped different steps
    for row in job.rows(Update):
        if len({one["scale"] for x in row for one in x.passes[-1:]}) > 1:
            apart.add(row[0].step)
    steps = [row for row in job.rows(Step) if len({x.which for x in row}) == 1]
    steps = [x for x in steps if x[0].step not in apart and (x[0].watched or not apart)]
    for row in need(steps, "no step can be compared"):
        if any(one.rates != row[0].rates for one in row):
            rates = ", ".join(f"{one.rates[0]:.4g}" for one in row)
            what = f"in step {row[0].step + 1}, the ranks have learning rates {rates}"
            yield Breach(what, row[0].place)
            return


@check(LEARNS, RISK, read="pitfall 15")
def schedule(job):
    """The learning rate schedule is longer or shorter than the training run.

    Count the steps of one process: len(loader) times the number of epochs.
    Not a mistake if: the schedule is meant to be longer or shorter than the run.
    """
    several(job)
    process, size = job.processes[0], job.world_size
    found = need(process.of(Schedule), "no scheduler existed at the end")
    ended = process.of(Exit) and all(one.whole for one in process.of(EpochEnd))
    need(ended, "the job did not train to the end")
    whole = [one for one in process.epochs if process.whole(one)]
    if len(whole) > 1 and not any(one.taken for one in found):
        yield Breach(f"no scheduler steps in {len(whole)} epochs", found[0].place)
    for one in found:
        ratio = (one.planned or one.taken) / max(1, one.taken)
        if not one.taken or 0.7 < ratio < 1.4:
            continue
        what = f"{one.type} is set to {one.planned} steps, but takes {one.taken}"
        mend = RESUMED * (one.made not in (None, one.planned))
        if mend:
            what += f" (the script made it with {one.made} steps)"
        elif abs(one.taken / max(1, one.step) / size - 1) < 0.1:
            what += f": {size} per optimizer step, as when accelerate has prepared it"
            mend = "Plan steps * accelerator.num_processes, or do not prepare it."
        elif any(abs(ratio / x - 1) < 0.15 for x in (size, 1 / size)):
            what += "; the factor is the world size"
        yield Breach(what, one.place, mend=mend)
