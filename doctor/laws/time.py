"""Law 10: the time of a step goes into work."""

from collections import Counter
from statistics import median

from ..law import SLOW, Breach, Law, NotJudged, check, need
from ..moments import Step
from ..spans import Runs, Spans, parts, timed
from .gradient import not_averaged
from .meeting import hangs
from .modes import Validation, validations
from .passes import Update
from .states import Layout

LAW = Law(10, "time", "Time goes into work")
LEAST = 0.05  # seconds: doctor does not judge shorter steps
SHARE = 0.05  # least share of a step that a fix must save
MENDS = {
    "data": "Load data in more processes (num_workers), or do less for each sample.",
    "validation": "Validate less often than in each step.",
    "saving": "Save less often than in each step.",
    "other code": "Look at what the loop does besides training: copies, prints, files.",
}


def walls(job) -> float:
    """Return a step's median duration in seconds; raise NotJudged for short steps."""
    if job.emulated:
        raise NotJudged("--cpu emulated the GPUs, whose times would differ")
    rows = [[one.wall for one in timed(process)] for process in job.processes]
    if min(map(len, rows), default=0) < 5:
        raise NotJudged("too few steps were seen: see --steps")
    wall = max(map(median, rows))
    if wall < LEAST:
        raise NotJudged(f"a median step takes {1000 * wall:.1f} ms, less than 50 ms")
    return wall


@check(LAW, SLOW, causes=[not_averaged], read="lesson 7")
def every_micro_batch(job):
    """DDP averages gradients in each pass of a step.

    Use model.no_sync() in all passes of a step except the last.
    """
    need(job.of(Layout), "DDP is not used")
    for row in job.rows(Update):
        passes = row[0].passes
        forwards = [one["forwards"][-1] for one in passes if one["forwards"]]
        places = {one["place"] for one in passes}
        if len(passes) > 1 and sum(forwards) >= len(passes) and len(places) == 1:
            what = f"DDP averages gradients {len(passes)} times per step"
            yield Breach(what, passes[0]["place"])
            return


FIRST = hangs, every_micro_batch  # the report names their findings first


@check(LAW, SLOW, general=True, needs=[Spans], causes=FIRST, read="docs/measure.md")
def bottleneck(job):
    """A part of a step takes time that a change could save.

    Look at the part's line in the table below.
    """
    wall, found = walls(job), []
    steps = [timed(process) for process in job.processes]
    shares = {}
    for rank, rows in enumerate(steps):
        for part in ("data", "validation", "saving", "other code"):
            share = median(parts(one)[part] / one.wall for one in rows)
            shares[part] = max(shares.get(part, (0, 0)), (share, rank))
    if any(one.watched for one in steps[0]):
        shares.pop("other code")  # it includes doctor's own work
    slow = slowest(job, steps, wall)
    if slow:
        found.append((1.0, slow))
    for part, (share, rank) in shares.items():
        if share > 2 * SHARE and not slow:
            what = f"{part} is {share:.0%} of a step of {1000 * wall:.0f} ms on rank "
            found.append((share, Breach(f"{what}{rank}", mend=MENDS[part])))
    columns = [*zip(*steps, strict=False)]
    total, costs = sum(column[0].wall for column in columns), Counter()
    for column in columns:
        for call in column[0].calls:  # the last rank to arrive does not wait
            costs[call] += min(one.calls.get(call, 0) for one in column)
    for call, seconds in costs.most_common(1):
        name, _, where = call.partition(" in ")
        if seconds > SHARE * total and not slow:
            what = f"{name} takes {seconds / total:.0%} of a step (communication)"
            mend = "Call it less often, or with less data."
            found.append((seconds / total, Breach(what, where, mend=mend)))
    for _, breach in sorted(found, key=lambda one: -one[0]):
        yield breach
    if not found:
        rest = ", ".join(f"{part} {share:.0%}" for part, (share, _) in shares.items())
        yield f"a median step takes {1000 * wall:.0f} ms: {rest}"


def slowest(job, steps: list[list[Spans]], wall: float) -> Breach | None:
    """Return a breach if one rank works longer in nearly all steps, and others wait."""
    if len(steps) < 2:
        return None
    rows = [[parts(one) for one in own] for own in steps]
    own = []  # without waiting for a core
    for found in steps:
        waits = [parts(one)["communication"] + one.queued for one in found]
        own.append([x.wall - wait for x, wait in zip(found, waits, strict=True)])
    means = [median(one) for one in own]
    slow = means.index(max(means))
    others = [one for n, one in enumerate(means) if n != slow]
    columns = [*zip(*own, strict=False)]
    often = sum(column[slow] == max(column) for column in columns)
    gain = means[slow] - max(others)
    if min(means) < 0:  # it waited for a core in collectives: the machine is loaded
        return None
    if gain < max(SHARE * wall, 0.2 * max(others)) or often < 0.8 * len(columns):
        return None
    names = [part for part in rows[0][0] if part != "communication"]
    each = {x: [median(row[x] for row in one) for one in rows] for x in names}
    more = {x: row[slow] - min(row) for x, row in each.items()}
    part = max(more, key=more.__getitem__)
    if more[part] < 0.5 * gain:
        return None
    what = f"rank {job.processes[slow].rank} needs {1000 * means[slow]:.0f} ms for its "
    what += f"part of a step, and the others, which need {1000 * max(others):.0f} ms, "
    what += f"wait: its {part} takes {1000 * more[part]:.0f} ms longer"
    return Breach(what, mend=f"Find out what extra work this rank does in its {part}.")


@check(LAW, SLOW, needs=[Validation], read="lesson 10")
def validation_with_gradients(job):
    """Validation computes gradients, which take time and memory.

    Validate inside torch.no_grad() or torch.inference_mode().
    """
    found = [x for x in validations(job) if x.gradients and not x.training]
    for one in found[:1]:
        what = f"rank {one.rank} validates {one.network} with gradients"
        yield Breach(what, one.place)


@check(LAW, SLOW, needs=[Spans, Runs], read="lesson 1")
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
