"""The mistakes that doctor looks for: one function for each, causes before effects.

A check takes a Job and yields its findings, each with a place in the user's code. It
raises NotChecked if the records lack what it needs. Its docstring says what is right if
the check finds nothing, how to fix a finding, and when a finding is not a mistake.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from math import exp
from statistics import fmean

from .job import Job, Process

WRONG, RISK, SLOW, NOTE = LEVELS = "WRONG", "RISK", "SLOW", "note"


class NotChecked(Exception):
    """Raised with the reason why a check cannot judge this job."""


@dataclass
class Finding:
    """One mistake that a check found."""

    check: str
    what: str  # with ranks, steps and numbers
    place: str  # file:line
    right_if: str  # when a RISK is not a mistake
    read: str  # a page that explains it
    level: str
    mend: str


@dataclass
class Report:
    """All findings, what is right, and why some checks were not made."""

    findings: list[Finding] = field(default_factory=list)
    right: list[str] = field(default_factory=list)
    not_checked: dict[str, str] = field(default_factory=dict)


# Each check's function, the checks whose findings could cause its own, what is right if
# it finds nothing, and the fields that all its findings share
CHECKS: list[tuple[Callable[[Job], Iterator], set[str], str, Finding]] = []


def check(level: str, causes: str = "", read: str | int = "pitfalls") -> Callable:
    """Add a function to the list of checks; `read` is a page, a lesson or a pitfall."""
    if isinstance(read, int):
        read = f"docs/pitfalls.md, number {read}"
    else:
        read = f"tutorial/{read}/README.md" if read[0] in "01" else f"docs/{read}.md"

    def add(function):
        right, _, mend = function.__doc__.partition(".\n\n")
        mend, _, right_if = " ".join(mend.split()).partition(" Not a mistake if: ")
        shared = Finding(function.__name__, "", "", right_if, read, level, mend)
        CHECKS.append((function, {*causes.split()}, right, shared))
        return function

    return add


def examine(job: Job) -> Report:
    """Run all checks."""
    report, named = Report(), set()
    for function, causes, right, shared in CHECKS:
        try:
            if earlier := named & causes:
                raise NotChecked(f"it could be an effect of {min(earlier)}")
            found = next(function(job), None)  # the first finding is enough
        except NotChecked as reason:
            report.not_checked[right] = str(reason)
            continue
        except Exception as error:  # the other checks' findings still count
            report.not_checked[right] = f"doctor's own error: {error!r}"
            continue
        if found is None:
            report.right.append(right)
            continue
        what, place, own = (*found, {})[:3]
        finding = replace(shared, what=what, place=place, **own)
        if finding.level != RISK:
            finding.right_if = ""
        if finding.level != NOTE:
            named.add(finding.check)
        report.findings.append(finding)
    report.findings.sort(key=lambda finding: LEVELS.index(finding.level))
    return report


# --- what the checks need ---


def near(one, other, tolerance: float = 1e-3) -> bool:
    """Return whether two lists of numbers are equal up to rounding."""
    length = lambda values: sum(x * x for x in values) ** 0.5  # noqa: E731
    gap = length(a - b for a, b in zip(one, other, strict=True))
    return gap <= tolerance * max(length(one), length(other)) or gap != gap


def alike(lists: list, tolerance: float = 1e-3) -> bool:
    """Return whether all lists of numbers are near the first one."""
    first = lists[0]
    return all(len(x) == len(first) and near(first, x, tolerance) for x in lists)


def gap(lists: list, tolerance: float) -> str:
    """Return the largest gap between lists of numbers, or "" if they are alike."""
    columns = [*zip(*lists, strict=True)]
    apart = max((max(values) - min(values) for values in columns), default=0)
    return "" if alike(lists, tolerance) else f"{apart:.3g}"


def is_factor(value: float, wanted: float) -> bool:
    """Return whether two numbers are equal up to rounding."""
    return abs(value - wanted) <= 0.002 * abs(wanted)


def proportional(values, others) -> bool:
    """Return whether one list is a positive multiple of the other, up to 1 %."""
    square = sum(x * x for x in values)
    ratio = sum(a * b for a, b in zip(values, others, strict=True)) / (square or 1)
    return near([ratio * x for x in values], others, 0.01)


def need(records, why: str):
    """Return records; raise NotChecked if there are none."""
    if not records:
        raise NotChecked(why)
    return records


def several(job: Job) -> None:
    """Raise NotChecked if the job has only one process."""
    if job.world_size < 2 or len(job.processes) < 2:
        raise NotChecked("this check needs at least two processes")


def compared(job: Job, name: str) -> list[list[dict]]:
    """Return the steps for which every rank recorded an entry, such as its rates."""
    several(job)
    return need(job.steps(name), "no step with unsharded weights was seen on all ranks")


def training(job: Job) -> list[dict]:
    """Return each rank's record of its training loader."""
    loaders, why = job.loaders(), "no DataLoader feeds the steps of every rank"
    return need(len(loaders) == len(job.processes) and loaders, why)


def gpus(job: Job) -> list[int]:
    """Return the GPU of each rank's weights, or an empty list on CPUs."""
    steps = [one.of("step")[0]["gpu"] for one in job.processes if one.of("step")]
    return [gpu for gpu in steps if gpu is not None]


def used(batches: list[dict]) -> set[int]:
    """Return the indices of the samples in these batches."""
    return {index for one in batches for index in one.get("indices", ())}


def same_inputs(job: Job) -> list[bool]:
    """For each forward pass of a step: do all ranks always get the same input?"""
    rows = [[one["inputs"] for one in row] for row in job.steps("inputs")]
    steps = [zip(*row, strict=False) for row in rows]
    passes = zip(*steps, strict=False) if len(steps) > 2 else ()
    return [all(len({*digests}) == 1 for digests in one) for one in passes]


# --- how the job ended ---

ENDINGS = "port_in_use file_race collectives_differ batch_counts_differ"
LOST = re.compile(
    r"onnection (closed|reset|refused)|roken pipe|recvValue failed|Socket Timeout|"
    r"Process(Raised|Exited)Exception|ChildFailedError|Horovod has been shut down|"
    r"HorovodInternalError|NCCL error"
)


def errors(job: Job) -> list[dict]:
    """Return the errors that ended processes; effects of other errors come last."""
    return sorted(job.of("error"), key=lambda one: bool(LOST.search(one["text"])))


@check(WRONG, read=3)
def port_in_use(job):
    """No other job on this machine uses the port where the processes meet.

    Omit init_method, rank and world_size, so that the launcher's port is used.
    """
    for one in errors(job):
        if "ddress already in use" in one["text"]:
            what = f"rank {one['rank']} cannot join the others: {one['text'][:150]}"
            yield what, one["place"]


@check(RISK, "port_in_use", read=3)
def own_port(job):
    """The processes meet at a free port that the launcher chose.

    Omit init_method, rank and world_size, so that the launcher's port is used.
    Not a mistake if: you never run a second job on this machine.
    """
    for one in job.of("init"):
        if 0 < one["own_port"] < 32768:  # the system picks free ports above
            what = (
                f"the port is always {one['own_port']}: a second job on this machine "
            )
            yield f"{what}fails, or joins this one", one["place"]
        need(not one["own_port"], "the script chose a port, which may be a free one")


@check(WRONG, "port_in_use", read=13)
def file_race(job):
    """No process reads a file before another one has written it.

    Make the other ranks wait in a barrier until rank 0 has written the file.
    """
    failed = {one["rank"] for one in job.of("error")}
    for one in errors(job)[:1]:
        if "FileNotFound" in one["text"] and one["path"]:
            # Rank 0 may have been stopped before it wrote the file
            if os.path.exists(one["path"]) or 0 not in failed:
                what = f"rank {one['rank']} cannot find {one['path']}, which another"
                yield f"{what} process writes, or was about to write", one["place"]


@check(RISK, read=12)
def batch_counts_differ(job):
    """All ranks have the same number of training batches.

    Give each rank the same number, as DistributedSampler does, or use DDP's join().
    Not a mistake if: the loop handles ranks that run out of batches, as join() does.
    """
    several(job)
    loaders = training(job)
    counts = [one["length"] for one in loaders]
    read = [len(process.batches(0)) for process in job.processes]
    ends = [len(one.batches(0)) for one in job.processes if 0 in one.whole_epochs()]
    if ends and max(read) > min(ends):
        counts = read
    need(None not in counts, "the lengths of the loaders are not known")
    if len({*counts}) > 1:
        what = f"ranks 0 to {len(counts) - 1} have {', '.join(map(str, counts))}"
        exits = all(process.of("exit") for process in job.processes)
        aborts = job.status and not exits and not job.interrupted
        level = WRONG if job.hung or job.of("error") or aborts else RISK
        yield f"{what} batches per epoch", loaders[0]["place"], {"level": level}


@check(WRONG, "batch_counts_differ", read="11_hangs")
def collectives_differ(job):
    """All ranks call the same collectives in the same order.

    Make every rank call every collective: move it out of branches that some ranks skip.
    """
    several(job)
    gone = [one for one in job.processes if one.of("exit") and not one.of("error")]
    for one in errors(job)[:1]:
        if gone and LOST.search(one["text"]):
            what = f"rank {gone[0].rank} ends while rank {one['rank']} waits for it"
            yield what, one["place"]
    rows = [process.of("collective") for process in job.processes]
    need(any(rows), "the script itself calls no collectives")
    for number, calls in enumerate(zip_longest(*rows), 1):
        if None in calls:
            without = job.processes[calls.index(None)]
            rank, one = next((rank, one) for rank, one in enumerate(calls) if one)
            read = [x for x in job.processes[rank].batches() if x["time"] < one["time"]]
            if job.hung or without in gone or len(without.batches()) > len(read):
                what = f"rank {without.rank} does not call {one['name']}(), which rank "
                yield f"{what}{rank} calls after step {one['step']}", one["place"]
            return
        if len({(one["name"], one["count"]) for one in calls}) > 1:
            what = f"for collective call {number}"
            for rank, one in enumerate(calls):
                what += f", rank {rank} calls {one['name']}({one['count'] or ''}) "
                what += f"at {one['place']}"
            yield what, calls[0]["place"]


@check(WRONG, ENDINGS)
def ends_with_an_error(job):
    """No process ends with an error.

    Read the traceback above: PyTorch's messages often say what to change.
    """
    for one in errors(job)[:1]:
        if LOST.search(one["text"]) and job.hung:
            return
        text = one["text"].split("\n")[0][:400]
        what = f"in step {one['step'] + 1}, rank {one['rank']} ends with {text}"
        yield what, one["place"]
    if job.status and not job.hung and not job.interrupted:
        what = f"the command ends with status {job.status} and no Python error"
        if all(process.of("exit") for process in job.processes):  # atexit ran
            mend = (
                "For 'terminate called' above, see Gloo's threads in docs/pitfalls.md."
            )
            yield f"{what}, after all ranks ended", "", {"level": NOTE, "mend": mend}
        yield what, ""


@check(WRONG, f"{ENDINGS} ends_with_an_error", read="11_hangs")
def hangs(job):
    """No process waits for something that never comes.

    Find the call that only some ranks make, or the rank that has an extra batch.
    """
    parts, stuck = [], []
    for process in job.processes:
        records = [x for x in process.records if x["kind"] not in ("exit", "error")]
        last = records[-1]
        waits = f"waits in {last.get('what')}() at {last.get('place')}"
        does = waits if last["kind"] == "waits" else "has ended"
        parts.append(f"after step {last['step']}, rank {process.rank} {does}")
        waits = last["kind"] == "waits" and last["what"] and last["seconds"] > 20
        stuck.append(waits and job.world_size > 1)
    if job.hung or (job.interrupted and all(stuck)):
        yield "; ".join(parts), ""


@check(RISK, f"{ENDINGS} ends_with_an_error hangs", read=11)
def steps_differ(job):
    """All ranks take the same number of optimizer steps.

    If one rank skips a step, all ranks must skip it: all_reduce the condition.
    Not a mistake if: the ranks' weights are averaged later, or only some ranks train.
    """
    several(job)
    counts = {one["rank"]: one["step"] for one in job.of("exit")}
    need(len(counts) == len(job.processes), "not every rank ran to the end")
    if len({*counts.values()}) > 1:
        what = ", ".join(f"rank {rank} takes {counts[rank]}" for rank in sorted(counts))
        yield f"{what} steps", job.of("step")[0]["place"]


@check(RISK, f"{ENDINGS} ends_with_an_error hangs", read=1)
def no_process_group(job):
    """The processes of the job belong to one process group.

    Call init_process_group() (or choose a distributed strategy), and wrap the network.
    Not a mistake if: the processes are meant to train separate networks.
    """
    if job.world_size > 1 and not job.of("rank") and (steps := job.of("step")):
        what = (
            f"{job.world_size} processes train, but none joins a process group: each "
        )
        yield f"{what}trains alone", steps[0]["place"]


# --- data ---


@check(WRONG, read="04_batches")
def datasets_differ(job):
    """All ranks use the same data set, split in the same way.

    Seed the data set and random_split's generator with the same seed on every rank.
    """
    several(job)
    records = need(job.of("loader"), "no DataLoader is used")
    for number in sorted({one["loader"] for one in records}):
        loaders = job.loaders(number)
        if len(loaders) < len(job.processes):
            continue
        if not all(one["divided"] for one in loaders):
            continue
        first = loaders[0]
        for key, how in (("data", ""), ("subset", "part of ")):
            if len({one[key] for one in loaders}) > 1:
                what = f"each rank has a different {how}{first['type']}, and a sampler "
                yield f"{what}divides its {first['samples']} samples", first["place"]
    one, other = (used(process.batches(0)) for process in job.processes[:2])
    if one and len(one & other) < 0.1 * len(one):  # the ranks divide the same indices
        one, other = map(contents, job.processes[:2])
        both = one.keys() & other.keys()
        differ = [index for index in both if one[index] != other[index]]
        if len(differ) > max(4, 0.5 * len(both)):
            what = f"{len(differ)} of {len(both)} samples that ranks 0 and 1 have both "
            what += "read have different contents on the two ranks"
            yield what, job.loaders()[0]["place"]


def contents(process: Process) -> dict[int, int]:
    """Return hashes of samples by index; {} if a sample's content changes."""
    found = {}
    for one in process.batches():
        pairs = zip(one.get("indices", ()), one.get("rows", ()), strict=False)
        for index, row in pairs:
            found.setdefault(index, []).append(row)
    again = [rows for rows in found.values() if len(rows) > 1]
    stay = sum(len({*rows}) == 1 for rows in again)
    fixed = again and stay > 0.9 * len(again)
    return {index: rows[0] for index, rows in found.items()} if fixed else {}


@check(WRONG, "datasets_differ no_process_group", read="04_batches")
def same_samples(job):
    """The ranks train on different samples.

    Give the DataLoader a DistributedSampler with the global rank.
    Not a mistake if: every rank is meant to read all samples in each epoch.
    """
    several(job)
    if not job.of("loader"):
        rows = [chain(*(one["inputs"] for one in p.of("step"))) for p in job.processes]
        rows = [Counter(row) for row in rows]
        once = [{x for x, count in row.items() if count == 1} for row in rows]
        both = set.intersection(*once)
        if all(same_inputs(job) or [False]) or len(both) > 0.1 * max(map(len, once)):
            what = (
                f"{len(both) or 'all'} inputs of rank 0's networks are also inputs of "
            )
            yield f"{what}the other ranks' networks", job.of("step")[0]["place"]
    loaders, rows = training(job), []
    fixed = not any(one["states"] for p in job.processes for one in p.fetches)
    seen = [{*chain(*(x.get("rows", ()) for x in p.batches()))} for p in job.processes]
    own = fixed and all(seen) and not set.intersection(*seen)
    own = own or len({one["data"] for one in loaders}) > 1
    place, total = loaders[0]["place"], loaders[0]["samples"]
    for process in job.processes:
        batches = process.batches(0)
        key = "rows" if own or not used(batches) else "indices"
        rows.append([tuple(sorted(one[key])) for one in batches if one.get(key)])
    same = [len({*batches}) == 1 for batches in zip(*rows, strict=False)]
    need(same, "the samples of the batches are not known")
    counts = [len({*chain(*row)}) for row in rows]
    if sum(same) >= 0.9 * len(same):
        what = f"{sum(same)} of the first {len(same)} batches are the same on all ranks"
        yield what, place
    elif total and not own and not loaders[0]["replacement"]:
        if all(count >= 0.99 * total for count in counts):
            what = f"in an epoch, each rank reads all {total} samples"
            yield what, place, {"level": RISK}


@check(WRONG, "same_samples", read=15)
def same_order(job):
    """Each epoch has a different order.

    Call sampler.set_epoch(epoch) at the start of each epoch.
    """
    process, loader = job.processes[0], training(job)[0]
    number = loader["loader"]
    # A loop that ends early may only inspect the data
    epochs = [x["epoch"] for x in process.of("end") if x["loader"] == number] or [0]
    epochs += [x["epoch"] for x in process.of("batch") if x["loader"] == number][-1:]
    epochs = [process.batches(n) for n in sorted({*epochs})[:2]]
    orders = [[x.get("indices") or x.get("labels") for x in one] for one in epochs]
    pairs = list(zip(*orders, strict=False)) if len(orders) > 1 else []
    if not pairs or None in pairs[0] or len({*pairs[0][0]}) < 2:
        raise NotChecked("no two epochs with known samples were seen: see --short")
    if all(one == other for one, other in pairs):
        what = f"two epochs have the same {len(pairs)} batches in the same order"
        note = {"level": NOTE, "mend": "Shuffle the training samples."}
        yield what, loader["place"], {} if loader["shuffle"] else note


@check(RISK, "same_samples datasets_differ", read="04_batches")
def left_out(job):
    """Each epoch uses all samples once.

    Give DistributedSampler the number of processes and the global rank, and call
    set_epoch() on every rank.
    Not a mistake if: the missing samples are left out on purpose.
    """
    loader = training(job)[0]
    stream = loader["sampler"] == "_InfiniteConstantSampler"  # an IterableDataset
    known = "DistributedSampler", "RandomSampler", "SequentialSampler"
    own = not stream and (loader["sampler"] not in known or loader["replacement"])
    for epoch in (0, 1):
        found = []
        for process in job.processes:
            batches = process.batches(epoch)
            rows = [one.get("rows" if stream else "indices") for one in batches]
            whole = epoch in process.whole_epochs() or len(batches) == loader["length"]
            if (not whole or None in rows) and epoch:
                return
            if not whole or None in rows:
                raise NotChecked("no complete epoch with known samples was seen")
            share = [*chain(*rows)]
            if own and len({*share}) < len(share):
                raise NotChecked("the script's own sampler repeats samples")
            found += share
        count, batch = len({*found}), loader["batch"] or max(map(len, rows))
        total = len(found) if stream or own else loader["samples"]
        if total - count >= max(job.world_size * batch, 0.02 * total):
            what = f"in epoch {epoch} the ranks read {len(found)} samples, {count} "
            what += "distinct ones" + f" out of {total}" * (total != len(found))
            yield what, loader["place"]


@check(WRONG, "datasets_differ", read=16)
def trained_on_validation(job):
    """No validation sample is trained on.

    Split the data set once, in the same way on every rank.
    """
    train, batches = training(job)[0], job.of("batch")
    numbers = {process.rank: process.training for process in job.processes}
    trained = used([x for x in batches if x["loader"] == numbers[x["rank"]]])
    others = {x["loader"] for x in job.of("evaluation")} - {*numbers.values(), None}
    need(others and trained, "no validation with its own DataLoader was seen")
    for number in sorted(others):
        other = job.loaders(number)[0]
        if other["data"] != train["data"] or other["subset"] == train["subset"]:
            continue  # other files; or the accuracy on the training set
        validated = used([one for one in batches if one["loader"] == number])
        if both := validated & trained:
            what = f"{len(both)} of {len(validated)} validation samples are trained on"
            yield what, other["place"]


@check(RISK, "same_samples no_process_group", read=9)
def same_augmentation(job):
    """The ranks draw different random numbers for their samples.

    Seed each rank differently: torch.manual_seed(seed + rank).
    Not a mistake if: the random numbers do not affect the samples.
    """
    several(job)
    if True in (inputs := same_inputs(job)):
        what = f"in every step, forward pass {inputs.index(True) + 1} gets the same "
        what += "input on all ranks, such as noise"
        yield what, job.of("step")[0]["place"]
    rows, same = [], Counter()
    for process in job.processes:
        seen, row = Counter(), {}  # each epoch starts new loader processes
        for one in sorted(process.fetches, key=lambda one: one["time"]):
            key = one["worker"], one["number"]
            seen[key] += 1
            if one["states"]:
                row[(*key, seen[key])] = one["states"]
        rows.append(row)
    both = [key for key in rows[0] if all(key in row for row in rows)]
    for (worker, number, count), drawn in rows[0].items():
        earlier = [rows[0].get((worker, number, n)) for n in range(1, count)]
        if number == 0 and worker is not None and drawn in earlier:
            what = "in a later epoch, loader processes start with the same random "
            mend = "Do not seed the generators with the same number for each epoch."
            own = {"mend": mend}
            yield f"{what}numbers as before", training(job)[0]["place"], own
    for key in need(both, "no random numbers were drawn while samples were loaded"):
        first, *others = (row[key] for row in rows)
        for kind, state in first.items():
            same[kind] += all(one.get(kind) == state for one in others)
    names = [kind for kind, count in same.items() if count >= 0.9 * len(both)]
    if names:
        what = f"in {max(same.values())} of {len(both)} batches the random numbers of "
        what += f"{' and '.join(names)} are the same on all ranks"
        yield what, training(job)[0]["place"]


# --- weights and gradients ---

# Separate networks
APART = "weights_differ steps_differ learning_rates_differ not_averaged"


@check(RISK, ENDINGS, read=18)
def not_restored(job):
    """A resumed run also restores the optimizer and the scheduler.

    Call load_state_dict() of the optimizer and of the scheduler, on every rank.
    Not a mistake if: you only want the weights.
    """
    for one in job.of("restored"):
        own = [x for x in job.of("restored") if x["rank"] == one["rank"]]
        own = [x for x in own if x["what"] == "weights"]  # perhaps a second attempt
        if one["lost"] and own[-1]["lost"]:
            what = (
                "load_state_dict() finds none of the network's names in the file, and "
            )
            mend = "Load what model.module.state_dict() saved, with strict=True."
            own = {"level": WRONG, "mend": mend}
            yield f"{what}loads no weight", one["place"], own
    loads = need(job.of("load"), "no checkpoint with an optimizer is loaded")
    done = {one["what"] for one in job.of("restored")}
    states = [one for one in job.of("restored") if one["what"] == "optimizer"]
    ranks = {one["rank"] for one in states}
    sent = any("optimizer" in one["name"] for one in job.of("collective"))
    if 0 < len(ranks) < len(job.processes) and not sent and not job.interrupted:
        what = f"only ranks {sorted(ranks)} restore the optimizer's state"
        yield what, loads[0]["place"], {"level": WRONG}
    for one in loads:
        lost = ["optimizer"] * ("optimizer" not in done)
        lost += ["schedule"] * (one["schedule"] and "schedule" not in done)
        own = [x["time"] for x in job.of("step") if x["rank"] == one["rank"]]
        if lost and own and own[-1] > one["time"]:
            what = f"the checkpoint holds the {' and the '.join(lost)}'s state, but "
            yield f"{what}nothing loads it", one["place"]


@check(WRONG, f"datasets_differ {APART}", read=16)
def wrong_accuracy(job):
    """A printed accuracy counts each validation sample once.

    Sum the correct predictions and the samples over all ranks, without the samples
    that DistributedSampler repeats, and divide once.
    Not a mistake if: the line is meant to cover one rank's samples only.
    """
    for line, value, name, right in misprinted(job, "evaluation", accuracies, values):
        what = (
            f"rank {line['rank']} prints {value:g}, {name}; counting each sample once"
        )
        own = {"level": RISK if "only" in name else WRONG}
        yield f"{what} gives {right:.4f}", line["place"], own


@check(WRONG, read=11)
def weights_differ(job):
    """All ranks start from the same weights.

    Wrap the network in DDP, or broadcast its weights from rank 0 before the first step.
    """
    first = compared(job, "before")[0]
    before, each = [one["before"] for one in first], first[0]["each"]
    if largest := gap(before, 1e-6):
        numbers, count = apart(before, each), len(before[0]) // each
        what = f"before the first step, the ranks' weights differ by up to {largest}"
        if 0 < len(numbers) < count / 2:
            what += (
                f": {len(numbers)} of the optimizer's {count} weights, the first is "
            )
            what += f"number {numbers[0] + 1}; outside the DDP model, or set later?"
        yield what, first[0]["place"]


@check(WRONG, "steps_differ not_restored", read=11)
def learning_rates_differ(job):
    """All ranks have the same learning rate.

    Step the scheduler equally often on every rank, with the same metric.
    """
    for row in compared(job, "rates"):
        if len({tuple(one["rates"]) for one in row}) > 1:
            rates = ", ".join(f"{one['rates'][0]:.4g}" for one in row)
            what = f"in step {row[0]['step'] + 1} the ranks have learning rates {rates}"
            yield what, row[0]["place"]
    for row in zip(*(process.of("plateau") for process in job.processes), strict=False):
        if not alike([[one["value"]] for one in row], 1e-6):
            values = ", ".join(f"{one['value']:.4g}" for one in row)
            what = f"the ranks give ReduceLROnPlateau {values}, which lowers their"
            yield f"{what} learning rates at different times", row[0]["place"]


def apart(lists: list, each: int) -> list[int]:
    """Return the numbers of the tensors (`each` numbers long) that differ."""
    starts = range(0, len(lists[0]), each)
    parts = [[one[start : start + each] for one in lists] for start in starts]
    return [number for number, part in enumerate(parts) if not alike(part)]


@check(WRONG, "weights_differ steps_differ same_samples ends_with_an_error", read=11)
def not_averaged(job):
    """Each step uses gradients that are averaged over all ranks.

    Wrap the network in DistributedDataParallel, and call the DDP model.
    """
    steps = []
    for row in compared(job, "gradients"):
        if any(row[0]["gradients"]) and len({one["optimizer"] for one in row}) == 1:
            steps.append(row)
    lists = [[one["gradients"] for one in row] for row in steps]
    numbers = [apart(x, row[0]["each"]) for x, row in zip(lists, steps, strict=True)]
    differ = [(row, found) for row, found in zip(steps, numbers, strict=True) if found]
    if not differ:
        seen = any(not alike([one["local"] for one in row]) for row in steps)
        need(seen, "the ranks' own gradients are equal, or were not seen")
        return
    (first, *_), numbers = differ[0]
    what = f"in {len(differ)} of {len(steps)} steps, from step {first['step'] + 1} on, "
    what += "the ranks use different gradients: "
    forwards, place = first["forwards"], first["place"]
    if job.of("ddp") and not forwards:
        mend = "Call model(x), not model.module(x) or the network inside."
        what += "DDP's forward() is not called, and so DDP averages nothing"
        yield what, place, {"mend": mend}
    if job.of("ddp") and not forwards[-1]:
        without = f"{forwards.count(False)} of {len(forwards)}"
        mend = "Use no_sync() in all passes of a step except the last."
        yield f"{what}no_sync() is active in {without} passes", place, {"mend": mend}
    values, each = first["gradients"], first["each"]
    clipped = [one["clipped"][0]["before"] for one in differ[0][0] if one["clipped"]]
    if len(clipped) == len(job.processes) and len(clipped[0]) == len(values):
        numbers = apart(clipped, each) or numbers  # clipping changes all gradients
    total = sum(any(values[n : n + each]) for n in range(0, len(values), each))
    if len(numbers) < total:
        mend = "Average these weights, too. With DDP, create all weights, and let them "
        mend += "require gradients, before you wrap the network; use its forward()."
        what += f"{len(numbers)} of {total} weights are not averaged, the first is the "
        yield f"{what}optimizer's number {numbers[0] + 1}", place, {"mend": mend}
    what += "nothing averages them"
    if not job.of("ddp"):
        own = [x for x in steps if x[0]["optimizer"] == first["optimizer"]]
        later = [x for x in own if x[0]["step"] > first["step"]]
        equal = [alike([one["before"] for one in row], 1e-6) for row in later]
        if any(equal) and not all(equal):
            what += "; their weights are averaged, as in local SGD"
            yield what, place, {"level": NOTE}
    yield what, place


@check(RISK, "weights_differ steps_differ", read="03_gradients")
def summed(job):
    """A step's gradient is the mean over ranks: not the sum, and not divided twice.

    Divide by the world size once. DDP and Horovod do that; all_reduce() does not.
    Not a mistake if: the learning rate accounts for it.
    """
    found, steps = Counter(), compared(job, "gradients")
    size, place = job.world_size, steps[0][0]["place"]
    for row in steps:
        ranks = zip(*(one["local"] for one in row), strict=True)
        local, own = [sum(values) / size for values in ranks], row[0]["gradients"]
        clips = [x for x in row[0]["clipped"] if x["which"] == row[0]["which"]]
        if clips and any(clips[0]["before"]):
            own = clips[0]["before"]
        square = sum(x * x for x in local)
        if not square or len(own) != len(local):
            continue
        ratio = sum(a * b for a, b in zip(local, own, strict=True)) / square
        scale = next((one["scale"] for one in row[0]["passes"] if one.get("scale")), 1)
        if near([ratio * x for x in local], own, 0.01):
            if scale != 1 and is_factor(ratio, 1) and not row[0]["clipped"]:
                what = f"the gradients are still {scale:g} times too large: use "
                mend = "Call scaler.step(optimizer), not optimizer.step()."
                own = {"level": WRONG, "mend": mend}
                yield f"{what}scaler.step()", row[0]["place"], own
            value = ratio * scale if is_factor(ratio * scale, 1) else ratio
            known = (w for w in (1, size, 1 / size) if is_factor(value, w))
            found[next(known, float(f"{value:.2g}"))] += 1
    need(found, "the ranks' own gradients were not seen, or were clipped")
    (value, count), *_ = found.most_common(1)
    if value != 1 and (count > 2 or value in (size, 1 / size)):
        how = {size: "the sum", 1 / size: f"1/{size} of the mean"}
        how = how.get(value, f"{value:g} times the mean")
        yield f"steps use {how} of the {size} ranks' gradients", place


@check(RISK, "weights_differ summed", read="07_accumulation")
def loss_scale(job):
    """The loss is divided by the number of micro-batches per step, and by nothing else.

    With n micro-batches, divide each one's mean loss by n. DDP averages over ranks.
    Not a mistake if: the learning rate accounts for it, or the factor is intended.
    """
    size, found = max(1, job.world_size), Counter()
    for row in job.steps("passes"):
        passes = row[0]["passes"]
        places, count = {one["place"] for one in passes}, len(passes)
        if len(places) > 1 or passes[0].get("reduction") != "mean":
            continue
        factors = {
            "": 1 / count,
            f"is not divided by {count}": 1,
            f"is divided by {count} twice": 1 / count**2,
            f"is divided by {size}, the world size": 1 / count / size,
            f"is multiplied by {size}, the world size": size / count,
        }
        value = passes[0]["factor"] / (passes[0]["scale"] or 1)
        how = next((k for k, factor in factors.items() if is_factor(value, factor)), "")
        what = f"a step has {count} passes, each with a mean loss that {how}"
        found[what if how else "", passes[0]["place"]] += 1
    need(found, "no mean loss was seen")
    for (what, place), steps in found.items():
        if what and steps >= 0.3 * sum(found.values()):
            yield what, place


@check(RISK, "weights_differ summed", read="07_accumulation")
def unequal_means(job):
    """All targets of a step have the same weight.

    Sum the losses (reduction="sum"), and divide by the number of the targets of all
    passes on all ranks (DDP averages over ranks: multiply by the world size).
    Not a mistake if: each batch should have the same weight.
    """
    seen, found = 0, []
    for row in job.steps("passes"):
        passes = [one for record in row for one in record["passes"]]
        if len(passes) > 1 and all(x.get("reduction") and x["count"] for x in passes):
            counts = [x["count"] if x["reduction"] == "mean" else 1 for x in passes]
            pairs = zip(passes, counts, strict=True)
            weights = [one["factor"] / count for one, count in pairs]
            seen += 1
            found += [row[0]] * (max(weights) > 1.1 * min(weights))
    need(seen, "no losses with known numbers of targets were seen")
    if len(found) > seen / 2:
        what = f"in {len(found)} of {seen} steps, losses are means over different "
        yield f"{what}numbers of targets, but have equal weights", found[0]["place"]


@check(RISK, read="08_collectives")
def gathered_without_gradient(job):
    """Gradients flow through the tensors that training gathers from all ranks.

    Use torch.distributed.nn.functional.all_gather(), or put each rank's own tensor
    back into its list.
    Not a mistake if: the loss does not use the result, or each rank's tensor is put
    back later.
    """
    steps = need(job.of("step"), "no optimizer took a step")
    if found := [one for one in steps if one.get("gathered")]:
        what = f"in step {found[0]['step'] + 1}, all_gather() gets a tensor with a "
        yield f"{what}gradient, and returns tensors without one", found[0]["gathered"]


@check(WRONG, "not_averaged", read="09_mixed_precision")
def clip_order(job):
    """Gradients are clipped after they are unscaled and averaged.

    Clip once per step, after scaler.unscale_(optimizer) and after the gradients are
    averaged.
    Not a mistake if: the gradients are meant to change after they are clipped.
    """
    rows = [row for row in job.steps("gradients") if row[0]["clipped"]]
    for row in need(rows, "no gradients are clipped"):
        what = f"in step {row[0]['step'] + 1} "
        for entries in zip(*(one["clipped"] for one in row), strict=False):
            before, place = [one["before"] for one in entries], entries[0]["place"]
            if entries[0]["scaled"]:
                yield f"{what}gradients are clipped before they are unscaled", place
            if not alike(before) and alike([one["gradients"] for one in row]):
                yield f"{what}each rank clips its own gradient", place
        last, used = row[0]["clipped"][-1], row[0]["gradients"]
        place, own = last["place"], {"level": RISK}
        if last["which"] == row[0]["which"] and last["norm"]:
            if not proportional(last["before"], used):
                yield f"{what}gradients change after they are clipped", place, own
        networks = {one["which"] for one in row[0]["clipped"]}
        after = {one["passes"] for one in row[0]["clipped"]}
        if len(after) == len(row[0]["passes"]) > 1 and len(networks) == 1:
            yield f"{what}each micro-batch's gradients are clipped", place, own


@check(WRONG, read="03_gradients")
def not_cleared(job):
    """Each step starts without gradients of the steps before it.

    Call optimizer.zero_grad() once per step.
    """
    steps = [one for one in job.of("step") if "stale" in one]
    found = [one for one in need(steps, "no step was seen") if one["stale"]]
    if found:
        what = (
            f"in step {found[0]['step'] + 1}, {found[0]['stale']} weights still have "
        )
        yield f"{what}the gradients of an earlier step", found[0]["place"]


@check(WRONG, read="03_gradients")
def zero_gradients(job):
    """Gradients are not zero.

    Call zero_grad() before backward(), give the optimizer the network's final weights
    (after fully_shard(), for example), and check that the loss depends on them: the
    cross-entropy of a single output is always 0.
    """
    need(job.of("step"), "no optimizer took a step")
    steps = [one for one in job.of("step") if "gradients" in one]
    for rank, optimizer in sorted({(x["rank"], x["optimizer"]) for x in steps}):
        own = [x for x in steps if (x["rank"], x["optimizer"]) == (rank, optimizer)]
        if len(own) > 1 and not any(any(one["gradients"]) for one in own):
            what = f"all gradients of rank {rank} are zero in {len(own)} steps"
            yield what, own[0]["place"]


# --- modes and metrics ---


@check(RISK, read=16)
def eval_mode(job):
    """Networks train in training mode, and validate in evaluation mode.

    Call model.train() at the start of each epoch, and model.eval() before validation.
    Not a mistake if: dropout and batch norm are meant to behave this way.
    """
    records = need(job.of("evaluation"), "no validation was seen")
    stateful = [one for one in records if one["stateful"]]
    for one in job.of("step"):
        if stateful and one["training"] is False:
            what = f"step {one['step'] + 1} trains a network in evaluation mode"
            yield what, one["place"]
    numbers = {None, *(process.training for process in job.processes)}
    for one in stateful:
        if one["training"] and one["loader"] not in numbers:
            if "hits" in one or not one["grad"]:
                what = f"rank {one['rank']} validates {one['network']} in training mode"
                yield what, one["place"]


@check(SLOW, "eval_mode", read=17)
def validation_with_gradients(job):
    """Validation computes no gradients.

    Validate inside torch.no_grad() or torch.inference_mode().
    """
    numbers = {None, *(process.training for process in job.processes)}
    for one in need(job.of("evaluation"), "no validation was seen"):
        if one["grad"] and not one["training"] and one["loader"] not in numbers:
            what = (
                f"rank {one['rank']} validates {one['network']} with gradients, which "
            )
            yield f"{what}take time and memory", one["place"]


@check(RISK, read=16)
def logged_by_each_rank(job):
    """Lightning averages what the script logs over all ranks.

    Call self.log(..., sync_dist=True), or log a metric of torchmetrics.
    Not a mistake if: only the progress bar shows the value.
    """
    for one in job.of("warning"):
        if "sync_dist=True" in one["text"]:
            what = "Lightning warns that self.log() gets the value of each rank's own "
            yield f"{what}samples", one["place"]


@check(WRONG, read=16)
def reduced_again(job):
    """Sums over all ranks are not summed again.

    Add up each rank's own numbers, and call all_reduce() once, at the end.
    """
    need(job.of("collective"), "the script itself calls no collectives")
    found = job.of("again")
    if len({one["rank"] for one in found}) == len(job.processes):
        what = "each call of all_reduce() sums what the last call has already summed"
        yield what, found[0]["place"]


@check(RISK, f"datasets_differ wrong_accuracy {APART}", read=16)
def wrong_loss(job):
    """A printed validation loss is the mean over all ranks' samples (or tokens).

    Sum the losses and the samples over all ranks, and divide once.
    Not a mistake if: the line is meant to cover one rank or one batch only.
    """
    found = misprinted(job, "loss", losses, loss_values, least=2)
    for line, value, name, right in found:
        if abs(value - right) > 0.01 * abs(right):
            what = (
                f"rank {line['rank']} prints {value:g}, {name}; the mean over all is "
            )
            yield f"{what}{right:.4f}", line["place"]


def misprinted(
    job: Job, kind: str, candidates: Callable, numbers: Callable, least: int = 1
) -> Iterator:
    """Yield the mistake that explains most printed results of validations.

    `candidates` gives a validation's true results, and what mistakes turn them into;
    `numbers` finds the printed ones. A mistake has to explain `least` validations.
    """
    names, places, known, passes = Counter(), {}, False, validations(job, kind)
    for number, records in enumerate(passes, 1):
        step, began = records[0]["step"], records[0]["time"]
        following = [one for one in passes[number:] if one[0]["step"] == step]
        lines = [x for x in job.of("printed") if x["step"] == step]
        found = [*numbers([line for line in lines if line["time"] > began])]
        right, others = candidates(records)
        union, _ = candidates([*chain(records, *following)])
        if any(abs(v - s * x) <= gap for x in right + union for _, v, gap, s in found):
            known = True
            continue
        until, matches = following[0][0]["time"] if following else float("inf"), {}
        for name, wrong in others.items():
            for line, value, gap, scale in found:
                exact = gap <= 0.01 * abs(value)  # or it may be a coincidence
                if line["time"] < until and abs(value - scale * wrong) <= gap and exact:
                    near = min(right, key=lambda x: abs(x - wrong))
                    matches[name] = line, value, name, scale * near
        names.update(matches.keys())
        places = matches | places
    if names:
        name = max(names, key=names.__getitem__)
        if names[name] >= least:
            yield places[name]
    need(known, "no printed number matches the outputs and labels")


def validations(job: Job, kind: str) -> list[list[dict]]:
    """Return the records of validations, as one list for each pass over a loader."""
    numbers, groups = {process.training for process in job.processes}, {}
    for one in job.of(kind):
        if {"hits", "value"} & {*one} and one["loader"] not in numbers - {None}:
            key = one["step"], one["loader"], one["epoch"]
            groups.setdefault(key, []).append(one)
    return [*groups.values()]


def loss_values(lines: list[dict]) -> Iterator[tuple[dict, float, float, int]]:
    """Yield possible losses and perplexities: line, number, rounding error, and 1."""
    for line in lines:
        if re.search("loss|ppl|perplex", line["text"].lower()):
            for text in re.findall(r"(?<![\w.])\d+\.\d{3,}", line["text"]):
                digits = len(text.partition(".")[2])
                yield line, float(text), 0.6 * 10**-digits, 1


def losses(records: list[dict]) -> tuple[list[float], dict[str, float]]:
    """Return a validation's loss and perplexity, and what mistakes turn them into."""
    indices = [*chain(*(one["indices"] or () for one in records))]
    if len({*indices}) < len(indices):
        return [], {}  # without the losses of the repeated samples, the mean is unknown
    ranks = {}
    for one in records:
        ranks.setdefault(one["rank"], []).append((one["value"], one["count"]))
    batches = {rank: fmean(v for v, _ in row) for rank, row in ranks.items()}
    own = {rank: mean_of(row) for rank, row in ranks.items()}
    right = mean_of([*chain(*ranks.values())])
    found = {
        "the mean of the batches' losses": fmean(batches.values()),
        "the mean of the ranks' losses": fmean(own.values()),
        "the sum of the ranks' losses": sum(own.values()),
    }
    for rank, row in ranks.items():
        found[f"the loss of rank {rank} only"] = own[rank]
        found[f"the mean over the batches of rank {rank} only"] = batches[rank]
        found[f"the loss of rank {rank}'s last batch only"] = row[-1][0]
    found = {name: value for name, value in found.items() if value != right}
    if max([right, *found.values()]) > 50:
        return [right], found
    found |= [(f"the exponential of {name}", exp(x)) for name, x in found.items()]
    return [right, exp(right)], found


def mean_of(pairs: list[tuple[float, int]]) -> float:
    """Return the mean of values that have different weights."""
    return sum(v * n for v, n in pairs) / (sum(n for _, n in pairs) or 1)


def values(lines: list[dict]) -> Iterator[tuple[dict, float, float, int]]:
    """Yield possible accuracies: line, number, rounding error, and 1 or 100 (%)."""
    for line in lines:
        for text in re.findall(r"(?<![\w.])(\d+) ?%", line["text"]):
            yield line, float(text), 0.99, 100  # rounded, or cut off
        for word, text in re.findall(r"(\w*)\W*(?<![\w.])(\d+\.\d+)", line["text"]):
            digits = len(text.partition(".")[2])
            for scale, least in ((1, 3), (100, 1)):
                if digits >= least and "loss" not in word.lower():
                    yield line, float(text), 0.6 * 10**-digits, scale


def accuracies(records: list[dict]) -> tuple[list[float], dict[str, float]]:
    """Return a validation's accuracy, and the values that mistakes turn it into."""
    once, ranks = {}, {}
    for number, one in enumerate(records):
        hits = [*one["hits"]]
        keys = one["indices"] or [(number, place) for place in range(len(hits))]
        once |= zip(keys, hits, strict=True)
        ranks.setdefault(one["rank"], []).append(hits)
    right, total = fmean(once.values()), len(once)
    every = [*chain(*(one["hits"] for one in records))]
    own = {rank: fmean(chain(*batches)) for rank, batches in ranks.items()}
    means = {rank: fmean(map(fmean, batches)) for rank, batches in ranks.items()}
    found = {
        "which counts repeated samples": fmean(every),
        "which counts repeated samples if they are correct": sum(every) / total,
        "the ranks' mean of correct samples, divided by all": sum(every)
        / total
        / len(ranks),
        "the mean of the batches' accuracies": fmean(means.values()),
        "the mean of the ranks' accuracies": fmean(own.values()),
    }
    for rank, value in own.items():
        found[f"which counts the samples of rank {rank} only"] = value
        found[f"the mean over the batches of rank {rank} only"] = means[rank]
        hits = sum(chain(*ranks[rank]))
        found[f"rank {rank}'s correct samples, divided by all"] = hits / total
    found["all ranks' correct samples, divided by one rank's own"] = sum(own.values())
    return [right], {name: value for name, value in found.items() if value != right}


@check(RISK, APART, read=16)
def buffers_differ(job):
    """All ranks validate a network with the same weights and buffers (batch norm).

    Broadcast the buffers from rank 0 before validation, or use SyncBatchNorm. Create
    an EMA model only after DDP has made all ranks' weights equal.
    Not a mistake if: the difference does not matter to you.
    """
    several(job)
    rows = [process.of("evaluation") for process in job.processes]
    rows = [[x for x in row if x.get("state") and not x["training"]] for row in rows]
    # The last network that a rank validates after a step; its size tells networks apart
    rows = [{(x["step"], len(x["state"])): x for x in row} for row in rows]
    both = set.intersection(*map(set, rows))
    for key in sorted(need(both, "the ranks validate no network after the same step")):
        row = [found[key] for found in rows]
        if not alike([one["state"] for one in row], 1e-4):
            what = f"after step {key[0]}, the ranks validate networks that differ"
            yield what, row[0]["place"]


@check(RISK, APART, read=16)
def own_buffers(job):
    """Buffers that training updates (except batch norm's) are the same on all ranks.

    All-reduce the statistics from which you update them: before each forward pass, DDP
    replaces the other ranks' buffers with rank 0's.
    Not a mistake if: rank 0's statistics alone are good enough.
    """
    several(job)
    for row in need(job.steps("buffers"), "no network has such buffers"):
        if apart([one["buffers"] for one in row], 8):
            what = (
                f"in step {row[0]['step'] + 1}, each rank updates buffers from its own "
            )
            yield f"{what}batch only", row[0]["place"]


@check(RISK, f"{APART} buffers_differ own_buffers hangs ends_with_an_error", read=11)
def weights_differ_in_the_end(job):
    """All ranks end with the same weights.

    Look for code that changes the weights on one rank only.
    Not a mistake if: only one rank's weights are used.
    """
    several(job)
    weights = [one["weights"] for one in job.of("exit")]
    last = [process.of("step")[-1:] for process in job.processes]
    if len(weights) < len(last) or len({x.get("which") for y in last for x in y}) != 1:
        raise NotChecked("not every rank trained the same weights to the end")
    if apart := gap(weights, 1e-5):
        what = f"in the end, the ranks' weights differ by up to {apart}"
        yield what, last[0][0]["place"]


# --- files ---


def saves(job: Job, key: str) -> list[dict]:
    """Return the calls to torch.save() that have a path, or weights."""
    found = [one for one in job.of("save") if one[key]]
    return need(found, f"torch.save() got no {key}")


@check(WRONG, read=20)
def several_save(job):
    """Only one rank saves each file.

    Save on rank 0 only.
    """
    for path, ranks in writers(saves(job, "path")).items():
        if len(ranks) > 1:
            what = f"{os.path.basename(path)} is saved by ranks {sorted(ranks)}"
            yield f"{what}, which overwrite each other's data", min(ranks.values())


@check(RISK, "several_save", read=20)
def several_write(job):
    """Only one rank writes each log and each other file.

    Write files on rank 0 only, or give each rank its own file.
    Not a mistake if: all ranks write the same content, or append whole lines.
    """
    several(job)
    for path, ranks in writers(need(job.of("opened"), "no file was written")).items():
        if len(ranks) > 1 and not path.startswith("/dev/"):
            what = f"{os.path.basename(path)} is written by ranks {sorted(ranks)}"
            yield what, min(ranks.values())


def writers(records: list[dict]) -> dict[str, dict[int, str]]:
    """Return, by path, which ranks write the file, and the places where they do it."""
    paths = {}
    for one in records:
        paths.setdefault(one["path"], {})[one["rank"]] = one["place"]
    return paths


@check(WRONG, read="16_sharded")
def shards_saved(job):
    """A file from one rank has whole tensors, not only that rank's shards.

    Use get_state_dict() with full_state_dict=True, or torch.distributed.checkpoint.
    """
    several(job)
    for one in saves(job, "path"):
        ranks = {x["rank"] for x in job.of("save") if x["shards"]}
        if one["shards"] and len(ranks) < len(job.processes):
            name = os.path.basename(one["path"])
            yield f"{name} has rank {one['rank']}'s shards of the weights", one["place"]


@check(RISK, "several_save", read=20)
def save_in_place(job):
    """A new checkpoint does not overwrite the only old one in place.

    Write to a temporary file, then os.replace() the old checkpoint with it.
    Not a mistake if: you also keep an older checkpoint.
    """
    written, found = set(), saves(job, "path")
    counts = Counter(one["path"] for one in found if one["weights"])
    if 1 in counts.values():
        return  # another file keeps older weights
    for one in found:
        if one["there"] and one["path"] in written:
            what = f"{os.path.basename(one['path'])} is overwritten in place: "
            yield what + "if the job is killed meanwhile, both are lost", one["place"]
        written.add(one["path"])


@check(RISK, read=18)
def ddp_keys(job):
    """Saved weights are named as in the network without DDP.

    Save model.module.state_dict().
    Not a mistake if: you load them only into a DDP model.
    """
    for one in saves(job, "weights"):
        if one["wrapped"]:
            name = os.path.basename(one["path"] or "a file")
            yield f"the weights in {name} are named module.*", one["place"]


@check(RISK, read=18)
def no_optimizer(job):
    """A checkpoint for resuming contains the optimizer's state.

    Also save optimizer.state_dict(), and load it.
    Not a mistake if: you never resume from it.
    """
    for one in saves(job, "weights"):
        if one["counts"] and one["state"] and not one["optimizer"]:
            name = os.path.basename(one["path"] or "a file")
            what = f"{name} has weights and a number of epochs or steps, but no "
            yield what + "optimizer state", one["place"]


@check(RISK, "hangs ends_with_an_error", read=15)
def schedule(job):
    """The learning-rate schedule is as long as the training.

    Count the steps of one process: len(loader) times the number of epochs.
    Not a mistake if: the schedule is meant to be longer, or shorter.
    """
    several(job)
    process, size = job.processes[0], job.world_size
    made, ends = process.of("schedule"), process.of("exit")
    need(made, "no scheduler from torch.optim.lr_scheduler is used")
    if not ends or not all(one["whole"] for one in process.of("end")):
        raise NotChecked("the job did not train to the end")
    whole = process.whole_epochs()
    if len(whole) > 1 and not any(count for _, count in ends[-1]["schedules"]):
        yield f"no scheduler takes a step in {len(whole)} epochs", made[0]["place"]
    for one, (planned, count) in zip(made, ends[-1]["schedules"], strict=False):
        ratio = (planned or count) / max(1, count)
        if count and not 0.7 < ratio < 1.4:
            what = f"{one['type']} is set to {planned} steps, but takes {count}"
            if any(abs(ratio / x - 1) < 0.15 for x in (size, 1 / size)):
                what += "; the factor is the world size"
            yield what, one["place"]


# --- speed ---


@check(SLOW, "not_averaged", read="07_accumulation")
def every_micro_batch(job):
    """DDP averages gradients once per step.

    Use model.no_sync() in all passes of a step except the last.
    """
    need(job.of("ddp"), "DDP is not used")
    for row in job.steps("forwards"):
        passes, forwards = row[0]["passes"], row[0]["forwards"]
        places = {one["place"] for one in passes}
        if len(passes) > 1 and sum(forwards) >= len(passes) and len(places) == 1:
            what = f"DDP averages gradients {len(passes)} times per step"
            yield what, passes[0]["place"]


@check(SLOW, read=10)
def unused_search(job):
    """DDP does not search for unused weights where there are none.

    Leave out find_unused_parameters=True.
    """
    steps = [one for one in job.of("step") if "missing" in one]
    for one in need(job.of("ddp"), "DDP is not used")[:1]:
        if one["search"] and steps and not any(x["missing"] for x in steps):
            what = f"find_unused_parameters=True, but in {len(steps)} steps no weight"
            yield f"{what} is unused", one["place"]


@check(SLOW, read="performance")
def small_buckets(job):
    """DDP's buckets are large enough.

    Leave bucket_cap_mb at its default, 25.
    """
    for one in need(job.of("ddp"), "DDP is not used")[:1]:
        if one["bucket"] < 2**20 and one["size"] > 4 * one["bucket"]:
            count, mib = one["size"] // one["bucket"], one["bucket"] / 2**20
            what = f"a step has about {count} all-reduces, in buckets of {mib:.2g} MiB"
            yield what, one["place"]


@check(SLOW, read="performance")
def host_syncs(job):
    """No line makes the host wait for the device in every step.

    Keep sums on the device, and read them only now and then.
    """
    for one in need(job.of("exit"), "no process ran to the end")[:1]:
        steps = one["watched"]
        need(steps > 4, "too few steps were seen")
        often = {place: n for place, n in one["syncs"] if n >= steps / 2}
        what = " and ".join(f"{n} of {steps} steps call {k}" for k, n in often.items())
        own = {"level": SLOW if gpus(job) else NOTE}
        if often:
            place = next(iter(often)).rpartition(" in ")[2]
            yield f"{what}; on a GPU, each call waits", place, own


@check(SLOW, read="performance")
def threads(job):
    """The processes do not start more compute threads than there are cores.

    Set OMP_NUM_THREADS to the number of cores divided by the number of processes.
    """
    steps = need(not gpus(job) and job.of("step"), "no step was taken on CPUs")
    cores, count = len(os.sched_getaffinity(0)), steps[0]["threads"]
    if count * len(job.processes) > 1.5 * cores:
        what = f"{len(job.processes)} processes have {count} threads each"
        yield f"{what}, but there are {cores} cores", ""


@check(WRONG, read=19)
def same_gpu(job):
    """Each process has its own GPU.

    Call torch.cuda.set_device(local_rank).
    """
    devices = need(gpus(job), "the job computes on the CPU")
    local = job.processes[0].of("start")[0]["environment"].get("LOCAL_WORLD_SIZE")
    if len({*devices}) < len(devices) and local == str(len(devices)):
        yield f"the ranks use GPUs {', '.join(map(str, devices))}", ""


PARTS = {  # of a step: the largest acceptable share of its time, and what to do beyond
    "data": (0.2, "Use more loader processes (num_workers), or decode faster."),
    "forward": (1, ""),
    "backward": (1, ""),
    "communication": (0.4, "Average once per step, in large buckets."),
    "optimizer": (0.35, "Use the optimizer's fused or foreach form."),
    "validation": (0.2, "Validate once per epoch."),
    "saving": (0.2, "Save less often."),
    "rest": (0.3, "Look at what else the loop does: copies, prints, files."),
}


def timed(process: Process) -> list[dict]:
    """Return the steps that were only timed; [] if there are fewer than five."""
    steps = [one for one in process.of("step")[5:] if "before" not in one]
    return steps if len(steps) > 4 else []


def times(process: Process) -> dict[str, float]:
    """Return a rank's seconds per step by part, from steps that were only timed."""
    steps = timed(process) or process.of("step")[5:]  # or the watched ones
    need(len(steps) > 4, "too few steps were seen: see --steps")
    found = {part: sum(x["parts"].get(part, 0) for x in steps) for part in PARTS}
    found["rest"] = max(0.0, sum(x["wall"] for x in steps) - sum(found.values()))
    return {part: seconds / len(steps) for part, seconds in found.items()}


@check(SLOW, "hangs", read="performance")
def bottleneck(job):
    """No part of a step takes more time than it should.

    Look for extra work on that rank, or for a problem with its host.
    """
    rows, steps = [times(process) for process in job.processes], job.of("step")
    own = [sum(row.values()) - row["communication"] for row in rows]
    share = {x: max(row[x] / sum(row.values()) for row in rows) for x in PARTS}
    others, slow = sorted(own)[:-1], own.index(max(own))
    found, total = [], sum((Counter(one["parts"]) for one in steps), Counter())
    calls = [x for x in total if "() in " in x and "synchronize" not in x]
    calls = [x for x in calls if total[x] > total["communication"] / 2]
    if others and share["communication"] > 0.15 and max(own) > 1.3 * others[-1] + 0.001:
        what = f"rank {slow} needs {1000 * own[slow]:.0f} ms for its part of a step, "
        what += f"and the others, which need {1000 * others[-1]:.0f} ms, wait"
        found.append((1.0, what, "", {}))
    for part, (limit, mend) in PARTS.items():
        if part == "rest" and not all(timed(one) for one in job.processes):
            continue  # the rest of a watched step is doctor's own work
        seen = [one for one in steps if part == "rest" or part in one["parts"]]
        often = len(seen) > len(steps) / 2
        if share[part] > limit and often and not (found and part == "communication"):
            what, place = f"{part} is {share[part]:.0%} of a step's time", ""
            if part == "communication" and calls:
                call, _, place = calls[0].partition(" in ")
                what += f", mostly {call}"
                mend = "Call it less often, or with less data."
            found.append((share[part], what, place, {"mend": mend}))
    for _, *finding in sorted(found, key=lambda one: -one[0]):
        yield finding


def time_table(job: Job) -> dict[int, dict[str, float]]:
    """Return each rank's seconds per step by part; {} if too few steps were seen."""
    try:
        return {process.rank: times(process) for process in job.processes}
    except NotChecked:
        return {}
