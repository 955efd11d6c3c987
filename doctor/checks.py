"""What doctor looks for: one function for each mistake, causes before their effects.

A check takes a Job and yields what is wrong, each with the place in the user's code. It
raises NotChecked where the records do not hold what it needs. Its docstring says what
is right where it finds nothing, how to mend what it finds, and when that is right.
"""

import inspect
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise, zip_longest

from .job import Job, Process

WRONG, RISK, SLOW, NOTE = LEVELS = "WRONG", "RISK", "SLOW", "note"


class NotChecked(Exception):
    """Why a check cannot judge this job."""


@dataclass
class Finding:
    """One thing that is wrong."""

    check: str
    what: str  # with ranks, steps and numbers
    place: str  # file:line
    right_if: str  # when a RISK is none
    read: str  # a page that explains it
    level: str
    mend: str


@dataclass
class Report:
    """All findings, what is right, and what was not checked with the reasons."""

    findings: list[Finding] = field(default_factory=list)
    right: list[str] = field(default_factory=list)
    not_checked: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict:
        """For --json."""
        return asdict(self)


@dataclass
class Check:
    """A function, whose docstring has what all its findings have in common."""

    function: Callable[[Job], Iterator]
    level: str
    causes: set[str]  # names of checks after whose findings this one is not made
    read: str

    def __post_init__(self):
        self.name = self.function.__name__
        parts = inspect.cleandoc(self.function.__doc__).split("\n\n")
        right, mend, *right_if = (" ".join(part.split()) for part in parts)
        self.right, self.mend = right.rstrip("."), mend
        self.right_if = right_if[0].removeprefix("Right if: ") if right_if else ""


PITFALLS = {  # the titles of docs/pitfalls.md
    3: "address-already-in-use",
    9: "the-same-random-numbers-everywhere",
    10: "expected-to-have-finished-reduction-in-the-prior-iteration",
    11: "each-process-trains-its-own-model",
    12: "it-hangs-in-the-last-batches-of-an-epoch",
    13: "watchdog-caught-collective-operation-timeout",
    15: "accuracy-falls-with-the-number-of-gpus",
    16: "validation-depends-on-the-number-of-gpus",
    18: "a-resumed-run-is-not-the-same-run",
    19: "every-process-takes-memory-on-gpu-0",
    20: "the-checkpoint-cannot-be-read",
}
CHECKS: list[Check] = []


def check(level: str, causes: str = "", read: str | int = "pitfalls") -> Callable:
    """Add a function to the list of checks; `read` is a page, a lesson or a pitfall."""
    if isinstance(read, int):
        read = f"docs/pitfalls.md#{read}-{PITFALLS[read]}"
    else:
        read = f"tutorial/{read}/README.md" if read[0] in "01" else f"docs/{read}.md"

    def add(function):
        CHECKS.append(Check(function, level, {*causes.split()}, read))
        return function

    return add


def examine(job: Job) -> Report:
    """Make all checks."""
    report = Report()
    for one in CHECKS:
        try:
            named = {found.check for found in report.findings if found.level != NOTE}
            if causes := named & one.causes:
                raise NotChecked(f"it could be an effect of {min(causes)}")
            found = next(one.function(job), None)  # the first finding is enough
        except NotChecked as reason:
            report.not_checked[one.right] = str(reason)
            continue
        if found is None:
            report.right.append(one.right)
            continue
        what, place, *own = found
        given = {"level": one.level, "mend": one.mend, **(own[0] if own else {})}
        right_if = one.right_if if given["level"] == RISK else ""
        finding = Finding(one.name, what, place, right_if, one.read, **given)
        report.findings.append(finding)
    report.findings.sort(key=lambda finding: LEVELS.index(finding.level))
    return report


# --- what the checks need ---


def near(one, other, tolerance: float = 1e-3) -> bool:
    """Whether two lists of numbers differ by no more than rounding."""
    length = lambda values: sum(x * x for x in values) ** 0.5  # noqa: E731
    gap = length(a - b for a, b in zip(one, other, strict=True))
    return gap <= tolerance * max(length(one), length(other)) or gap != gap


def alike(lists: list, tolerance: float = 1e-3) -> bool:
    """Whether all lists of numbers are near the first one."""
    first = lists[0]
    return all(len(x) == len(first) and near(first, x, tolerance) for x in lists)


def is_factor(value: float, wanted: float) -> bool:
    """Whether two numbers are equal up to rounding."""
    return abs(value - wanted) <= 0.002 * abs(wanted)


def several(job: Job) -> None:
    """Raise NotChecked if the job has one process."""
    if job.world_size < 2 or len(job.processes) < 2:
        raise NotChecked("the job has one process, and this is about several")


def compared(job: Job, name: str) -> list[list[dict]]:
    """Steps of which every rank has certain numbers."""
    several(job)
    if steps := job.steps(name):
        return steps
    raise NotChecked(
        "no optimizer took a step on every rank, with weights that are whole"
    )


def training(job: Job) -> list[dict]:
    """The training loader's record of each rank."""
    loaders = job.loaders()
    if len(loaders) < len(job.processes) or not loaders:
        raise NotChecked("no DataLoader feeds the steps of every rank")
    return loaders


def gpus(job: Job) -> list[int]:
    """The GPU of each rank's weights; an empty list on CPUs."""
    steps = [one.of("step")[0]["gpu"] for one in job.processes if one.of("step")]
    return [gpu for gpu in steps if gpu is not None]


def used(batches: list[dict]) -> list[int]:
    """The samples of some batches."""
    return [index for one in batches for index in one.get("indices", ())]


# --- how the job ended ---

LOST = re.compile(
    r"onnection (closed|reset|refused)|roken pipe|recvValue failed|Socket Timeout|"
    r"Process(Raised|Exited)Exception|ChildFailedError|Horovod has been shut down|"
    r"HorovodInternalError|NCCL error"
)
CURES = {
    "Expected to have finished reduction": "Some weights got no gradient: use all "
    "in every forward pass, or give DDP find_unused_parameters=True.",
    "deserialize object on a CUDA device": 'Give torch.load map_location="cpu".',
    "environment variable RANK expected": "Start the script with torchrun.",
    "out of memory": "Make the batches of each process smaller.",
}


def errors(job: Job) -> list[dict]:
    """Errors that ended processes; effects of another process's end come last."""
    return sorted(job.of("error"), key=lambda one: bool(LOST.search(one["text"])))


@check(RISK, read=3)
def port_in_use(job):
    """The processes meet at a port that is free and that the launcher chose.

    Leave out init_method, rank and world_size, so that the launcher's port is used.

    Right if: this machine never runs a second job.
    """
    for one in errors(job):
        if "EADDRINUSE" in one["text"] or "ddress already in use" in one["text"]:
            what = f"rank {one['rank']} cannot join the others: {one['text'][:150]}"
            yield what, one["place"], {"level": WRONG}
    for one in job.of("init"):
        if (
            0 < one["own_port"] < 32768
        ):  # a free port, which the system chooses, is above
            what = f"the script itself chooses port {one['own_port']}: a second job on "
            yield what + "this machine fails, or joins this one", one["place"]


@check(WRONG, "port_in_use", read=13)
def file_race(job):
    """No process reads a file before another one has written it.

    Let the other ranks wait in a barrier until rank 0 has written the file.
    """
    saved = {one["path"]: one for one in job.of("save")}
    failed = {one["rank"] for one in job.of("error")}
    for one in errors(job)[:1]:
        path = os.path.abspath(one["path"]) if one["path"] else None
        if "FileNotFound" not in one["text"] or path is None:
            continue
        what = f"rank {one['rank']} misses {one['path']}"
        if path in saved:
            yield f"{what}, which rank {saved[path]['rank']} writes", one["place"]
        elif os.path.exists(path) or 0 not in failed:  # rank 0 may have been ended
            yield f"{what}, which another process writes, or was about to", one["place"]


@check(RISK, read=12)
def batch_counts_differ(job):
    """All ranks have the same number of training batches.

    Give each rank the same number, as DistributedSampler does, or use DDP's join().

    Right if: the loop waits for those that have more, as join() does.
    """
    several(job)
    loaders = training(job)
    counts = [one["length"] for one in loaders]
    for epoch in {one["epoch"] for one in job.of("end")}:
        ends, read = [], []
        for process, loader in zip(job.processes, loaders, strict=True):
            read.append(len(job.batches(process, loader["loader"], epoch)))
            keys = [(x["loader"], x["epoch"], x["whole"]) for x in process.of("end")]
            ends += [read[-1]] if (loader["loader"], epoch, True) in keys else []
        if ends and max(read) > min(ends):
            counts = read
    if None in counts:
        raise NotChecked("the lengths of the loaders are not known")
    if len({*counts}) > 1:
        level = WRONG if job.hung or job.of("error") else RISK
        what = (
            f"ranks 0 to {len(counts) - 1} have {', '.join(map(str, counts))} batches"
        )
        yield f"{what} in an epoch", loaders[0]["place"], {"level": level}


@check(WRONG, "batch_counts_differ", read="11_hangs")
def collectives_differ(job):
    """All ranks call the same collectives in the same order.

    Let every rank call every collective: move it out of branches that not all take.
    """
    several(job)
    rows = [process.of("collective") for process in job.processes]
    ended = [one for one in job.processes if one.of("exit") and not one.of("error")]
    for one in errors(job)[:1] if ended else ():
        if LOST.search(one["text"]):
            what = f"rank {ended[0].rank} ends while rank {one['rank']} waits for it"
            yield what, one["place"]
    if not any(rows):
        raise NotChecked("the script itself calls no collectives")
    for number, calls in enumerate(zip_longest(*rows), 1):
        if None in calls:
            without = job.processes[calls.index(None)]
            one, process = next(
                (x, p) for x, p in zip(calls, job.processes, strict=True) if x
            )
            number = job.training(process)
            seen = [x for x in process.of("batch") if x["loader"] == number]
            before = [x for x in seen if x["time"] < one["time"]]
            others = [x for x in without.of("batch") if x["loader"] == number]
            if job.hung or without in ended or len(others) > len(before):
                what = f"rank {without.rank} does not call {one['name']}(), which rank "
                yield (
                    f"{what}{process.rank} calls after step {one['step']}",
                    one["place"],
                )
            return
        if len({(one["name"], one["count"]) for one in calls}) > 1:
            parts = [
                f"rank {rank} calls {x['name']}({x['count'] or ''}) at {x['place']}"
                for rank, x in enumerate(calls)
            ]
            yield f"as collective call {number}, " + ", ".join(parts), calls[0]["place"]


@check(WRONG, "port_in_use file_race collectives_differ batch_counts_differ")
def ends_with_an_error(job):
    """No process ends with an error.

    Read the traceback above.
    """
    found = errors(job)
    if found and not (LOST.search(found[0]["text"]) and job.hung):
        one = found[0]
        cures = [cure for words, cure in CURES.items() if words in one["text"]]
        text = one["text"].split("\n")[0][:300]
        what = f"in step {one['step'] + 1}, rank {one['rank']} ends with {text}"
        yield what, one["place"], {"mend": cures[0]} if cures else {}
    elif not found and job.status and not job.hung and not job.interrupted:
        what = f"the command ends with status {job.status} and no Python error"
        if all(process.of("exit") for process in job.processes):  # or nearly so
            mend = (
                "If 'terminate called' is above: Gloo's threads, see docs/pitfalls.md."
            )
            yield f"{what}, after all ranks", "", {"level": NOTE, "mend": mend}
        yield what, ""


@check(
    WRONG,
    "ends_with_an_error port_in_use file_race batch_counts_differ collectives_differ",
    read="11_hangs",
)
def hangs(job):
    """No process waits for something that never comes.

    Find the call that one rank makes and another does not, or the batch that it has
    more.
    """
    if job.hung:
        parts = []
        for process in job.processes:
            last = process.last()
            waits = f"waits in {last.get('what')}() at {last.get('place')}"
            does = waits if last["kind"] == "waits" else "has ended"
            parts.append(f"after step {last['step']}, rank {process.rank} {does}")
        yield "; ".join(parts), ""


# --- data ---


@check(WRONG, read="04_batches")
def datasets_differ(job):
    """All ranks have one data set, which is split in the same way.

    Make the data set, and random_split's generator, from a seed that all ranks share.
    """
    several(job)
    numbers = {one["loader"] for one in job.of("loader")}
    if not numbers:
        raise NotChecked("no DataLoader is used")
    for number in sorted(numbers):
        loaders = job.loaders(number)
        if len(loaders) < len(job.processes):
            continue
        first, divided = loaders[0], all(one["divided"] for one in loaders)
        if len({one["data"] for one in loaders}) > 1:
            if divided:
                what = f"{first['type']} has other samples on each rank, and "
                yield what + "each rank's sampler takes a part of them", first["place"]
        elif len({one["subset"] for one in loaders}) > 1:
            if divided:
                what = f"each rank has another part of {first['type']}, with "
                what += f"{first['samples']} samples, and a sampler divides it again"
                yield what, first["place"]


@check(WRONG, "datasets_differ", read="04_batches")
def same_samples(job):
    """The ranks train on different samples.

    Give the DataLoader a DistributedSampler with the global rank.

    Right if: you call that an epoch.
    """
    several(job)
    if not job.of("loader"):
        inputs = [[one["inputs"] for one in row] for row in job.steps("inputs")]
        if len(inputs) > 2 and all(row[0] and row[1:] == row[:-1] for row in inputs):
            place = job.of("step")[0]["place"]
            yield (
                f"in {len(inputs)} steps the networks of all ranks get the same",
                place,
            )
    loaders, rows = training(job), []
    own = len({one["data"] for one in loaders}) > 1
    for process, loader in zip(job.processes, loaders, strict=True):
        batches = job.batches(process, loader["loader"], 0)
        key = "rows" if own or not used(batches) else "indices"
        rows.append([tuple(sorted(one[key])) for one in batches if one.get(key)])
    same = [len({*batches}) == 1 for batches in zip(*rows, strict=False)]
    if not same:
        raise NotChecked("the samples of the batches are not known")
    flat = [one for batch in rows[0] for one in batch] if key == "rows" else []
    if len({*flat}) < 0.6 * len(flat):
        what = (
            f"an epoch of rank 0 has {len(flat)} samples, {len({*flat})} different ones"
        )
        yield what + ": do all loader processes read all?", loaders[0]["place"]
    total, place = loaders[0]["samples"], loaders[0]["place"]
    if sum(same) >= 0.9 * len(same):
        what = f"{sum(same)} of the first {len(same)} batches are the same on all ranks"
        yield what, place
    elif total and not own and not loaders[0]["replacement"]:
        counts = [len({index for batch in row for index in batch}) for row in rows]
        if all(count >= 0.99 * total for count in counts):
            what = f"in an epoch, each rank goes through all {total} samples"
            yield what, place, {"level": RISK}


@check(WRONG, "same_samples", read=15)
def same_order(job):
    """Each epoch has an order of its own.

    Call sampler.set_epoch(epoch) at the start of each epoch.
    """
    process, loader = job.processes[0], training(job)[0]
    number = loader["loader"]
    ends = [one["epoch"] for one in process.of("end") if one["loader"] == number]
    numbers = ends or [0]  # a pass that is left early only looks at the data
    numbers += [x["epoch"] for x in process.of("batch") if x["loader"] == number][-1:]
    epochs = [job.batches(process, number, n) for n in sorted({*numbers})[:2]]
    orders = [[x.get("indices") or x.get("labels") for x in one] for one in epochs]
    pairs = list(zip(*orders, strict=False)) if len(orders) > 1 else []
    if not pairs or None in pairs[0] or len({*pairs[0][0]}) < 2:
        raise NotChecked("no two epochs with known samples were seen: see --short")
    if all(one == other for one, other in pairs):
        what = f"two epochs have the same {len(pairs)} batches in the same order"
        mend = "Shuffle the training samples."
        own = {} if loader["shuffle"] else {"level": NOTE, "mend": mend}
        yield what, loader["place"], own


@check(RISK, "same_samples datasets_differ", read="04_batches")
def left_out(job):
    """Each epoch uses all samples once.

    Give DistributedSampler the number of processes and the global rank.

    Right if: the others are left out on purpose.
    """
    loader, found = training(job)[0], []
    stream = loader["sampler"] == "_InfiniteConstantSampler"  # an IterableDataset
    known = "DistributedSampler", "RandomSampler", "SequentialSampler"
    own = not stream and (loader["sampler"] not in known or loader["replacement"])
    for process in job.processes:
        number = job.training(process)
        ends = [(x["loader"], x["epoch"], x["whole"]) for x in process.of("end")]
        batches = job.batches(process, number, 0)
        rows = [one.get("rows" if stream else "indices") for one in batches]
        whole = (number, 0, True) in ends or len(batches) == loader["length"]
        if not whole or None in rows:
            raise NotChecked("no whole epoch with known samples was seen")
        share = [sample for row in rows for sample in row]
        if own and len({*share}) < len(share):
            raise NotChecked("a sampler of the script's own draws samples repeatedly")
        found += share
    count, batch = len({*found}), loader["batch"] or max(map(len, rows))
    total = len(found) if stream or own else loader["samples"]
    if total - count >= max(job.world_size * batch, 0.02 * total):
        what = f"in epoch 0 the ranks take {len(found)} samples, {count} different ones"
        yield what + f" of {total}" * (total != len(found)), loader["place"]


@check(WRONG, "datasets_differ", read=16)
def trained_on_validation(job):
    """No validation sample is trained on.

    Split the data set once, in the same way on every rank.
    """
    train, numbers = training(job)[0], {p.rank: job.training(p) for p in job.processes}
    batches = job.of("batch")
    trained = {*used([x for x in batches if x["loader"] == numbers[x["rank"]]])}
    loaders = {x["loader"] for x in job.of("evaluation")} - {*numbers.values(), None}
    if not loaders or not trained:
        raise NotChecked("no validation with a DataLoader of its own was seen")
    for number in sorted(loaders):
        other = job.loaders(number)[0]
        if other["data"] != train["data"] or other["subset"] == train["subset"]:
            continue  # other files; or the accuracy on the training set
        validated = {*used([one for one in batches if one["loader"] == number])}
        if both := validated & trained:
            what = f"{len(both)} of {len(validated)} validation samples are trained on"
            yield what, other["place"]


@check(RISK, "same_samples", read=9)
def same_augmentation(job):
    """The ranks draw different random numbers for their samples.

    Seed each rank differently: torch.manual_seed(seed + rank).

    Right if: nothing that is drawn changes samples.
    """
    several(job)
    rows, same = [], Counter()
    for process in job.processes:
        seen, row = Counter(), {}  # each epoch starts new loader processes
        for one in sorted(process.fetches, key=lambda one: one["time"]):
            key = one["worker"], one["number"]
            seen[key] += 1
            if one["states"]:
                row[(*key, seen[key])] = one
        rows.append(row)
    both = [key for key in rows[0] if all(key in row for row in rows)]
    inputs = [[one["inputs"] for one in row] for row in job.steps("inputs")]
    for number in range(min((len(x) for row in inputs for x in row), default=0)):
        if len(inputs) > 2 and all(
            len({x[number] for x in row}) == 1 for row in inputs
        ):
            what = (
                f"in {len(inputs)} steps, forward pass {number + 1} gets the same input"
            )
            yield f"{what} on all ranks, such as noise", job.of("step")[0]["place"]
    drawn = [
        len({tuple(one["drawn"]) for one in row}) == 1 for row in job.steps("drawn")
    ]
    if len(drawn) > 2 and sum(drawn) > 0.5 * len(job.steps("gradients")):
        what = f"in {sum(drawn)} steps, draws from a generator of the script's own are"
        yield f"{what} the same on all ranks", job.of("step")[0]["place"]
    if not both:
        raise NotChecked("samples draw no random numbers of torch, random or NumPy")
    for key in both:
        calls = [row[key] for row in rows]
        if any(one["seeds"] for one in calls):  # what is seeded for a sample decides
            same["seeds"] += all(one["seeds"] == calls[0]["seeds"] for one in calls)
            continue
        for kind in calls[0]["states"]:
            same[kind] += len({one["states"].get(kind) for one in calls}) == 1
    names = [kind for kind, count in same.items() if count >= max(1, 0.9 * len(both))]
    if names:
        what = f"in {max(same.values())} of {len(both)} batches the random numbers of "
        yield (
            what + f"{' and '.join(names)} are the same on all ranks",
            training(job)[0]["place"],
        )


# --- weights and gradients ---


@check(WRONG, read=11)
def weights_differ(job):
    """All ranks start from the same weights.

    Wrap the network in DDP, or broadcast its weights from rank 0 before the first step.
    """
    first = compared(job, "before")[0]
    before = [one["before"] for one in first]
    if len({len(one) for one in before}) > 1:
        raise NotChecked("the ranks have optimizers of different sizes")
    if not alike(before, 1e-6):
        pairs = zip(*before, strict=True)
        gap = max(max(values) - min(values) for values in pairs)
        what = (
            f"before the first step the weights of the ranks differ by up to {gap:.3g}"
        )
        yield what, first[0]["place"]


@check(WRONG, read=11)
def learning_rates_differ(job):
    """All ranks have the same learning rate.

    Let every rank take the same steps of the schedule.
    """
    for number, row in enumerate(compared(job, "rates"), 1):
        if len({tuple(one["rates"]) for one in row}) > 1:
            rates = ", ".join(f"{one['rates'][0]:.4g}" for one in row)
            yield (
                f"in step {number} the ranks have learning rates {rates}",
                row[0]["place"],
            )


@check(WRONG, "weights_differ same_samples ends_with_an_error", read=11)
def not_averaged(job):
    """Each step uses gradients that are averaged over all ranks.

    Wrap the network in DistributedDataParallel, and call the wrapped one.
    """
    steps = compared(job, "gradients")
    steps = [
        x
        for x in steps
        if any(x[0]["gradients"]) and alike([[y["optimizer"]] for y in x])
    ]
    differ = [n for n, x in enumerate(steps) if not alike([y["gradients"] for y in x])]
    if not differ:
        if not any(not alike([one["local"] for one in row]) for row in steps):
            raise NotChecked("the ranks' own gradients are equal, or not seen")
        return
    row, mend = steps[differ[0]], None
    later = [
        x for x in steps[differ[0] + 1 :] if x[0]["optimizer"] == row[0]["optimizer"]
    ]
    later = [alike([one["before"] for one in x], 1e-6) for x in later]
    forwards, how = row[0]["forwards"], "nothing averages them"
    if job.of("ddp") and not forwards:
        how = "DDP's forward() is not called, and so DDP averages nothing"
        mend = "Call model(x), not model.module(x) or the network inside."
    elif job.of("ddp") and not all(forwards):
        how = (
            f"no_sync() is active in {forwards.count(False)} of {len(forwards)} passes"
        )
        mend = "Use no_sync() in all passes of a step but the last."
    what = f"in {len(differ)} of {len(steps)} steps, from step {differ[0] + 1} on, the "
    what, own = (
        f"{what}ranks use different gradients: {how}",
        {"mend": mend} if mend else {},
    )
    if (
        not job.of("ddp") and not all(later) and any(later)
    ):  # weights become equal again
        what, own = (
            f"{what}; their weights are averaged, as in local SGD",
            {"level": NOTE},
        )
    yield what, row[0]["place"], own


@check(RISK, "weights_differ", read="03_gradients")
def summed(job):
    """A step's gradient is the mean over the ranks, neither their sum nor divided
    twice.

    Divide by the world size once: DDP and Horovod do so themselves, all_reduce() does
    not.

    Right if: the learning rate is meant for it.
    """
    found, steps = Counter(), compared(job, "gradients")
    size, place = job.world_size, steps[0][0]["place"]
    for one, other in pairwise(job.steps("before")):  # local SGD
        before = [
            sum(column) for column in zip(*(x["before"] for x in one), strict=True)
        ]
        apart = not alike([x["before"] for x in one], 1e-6)
        if apart and alike([x["before"] for x in other], 1e-6):
            if near(before, other[0]["before"], 0.2):
                yield f"weights become the sum of the {size} ranks' weights", place
    for row in steps:
        local = [
            sum(column) / size
            for column in zip(*(x["local"] for x in row), strict=True)
        ]
        square, own = sum(x * x for x in local), row[0]["gradients"]
        if row[0]["clipped"]:
            own = row[0]["clipped"][0]["before"]
        if not square or len(own) != len(local):
            continue
        ratio = sum(a * b for a, b in zip(local, own, strict=True)) / square
        scale = next((one["scale"] for one in row[0]["passes"] if one.get("scale")), 1)
        value = ratio * scale if is_factor(ratio * scale, 1) else ratio
        if near([ratio * x for x in local], own, 0.01):
            found[next((w for w in (1, size, 1 / size) if is_factor(value, w)), 0)] += 1
    if not found:
        raise NotChecked("the ranks' own gradients are not seen, or they are clipped")
    (value, _), *_ = found.most_common(1)
    if value not in (0, 1):
        how = "the sum" if value == size else f"1/{size} of the mean"
        yield f"steps use {how} of the {size} ranks' gradients", place


@check(RISK, "weights_differ summed", read="07_accumulation")
def loss_scale(job):
    """The loss is divided by the number of micro-batches of a step, and by nothing
    else.

    Divide the mean loss of each micro-batch by their number. DDP averages over ranks.

    Right if: the learning rate is meant for it, or the factor has another reason.
    """
    size, found, seen = max(1, job.world_size), Counter(), 0
    for row in job.steps("passes"):
        passes = row[0]["passes"]
        if (
            len({x["place"] for x in passes}) != 1
            or passes[0].get("reduction") != "mean"
        ):
            continue
        count, value = len(passes), passes[0]["factor"] / (passes[0]["scale"] or 1)
        seen += 1
        hows = {
            f"which is not divided by {count}": count > 1 and 1,
            f"which is divided by {count} twice": count > 1 and 1 / count**2,
            f"which is divided by {size}, the world size": size > 1
            and 1 / count / size,
            f"which is multiplied by {size}, the world size": size > 1 and size / count,
        }
        for how, wanted in hows.items():
            if wanted and is_factor(value, wanted) and not is_factor(value, 1 / count):
                found[f"a step has {count} passes, each with a mean loss {how}"] += 1
                place = passes[0]["place"]
                break
    if not seen:
        raise NotChecked("no loss that is a mean was seen")
    if found and found.most_common(1)[0][1] >= 0.3 * seen:
        yield found.most_common(1)[0][0], place


@check(WRONG, "not_averaged", read="09_mixed_precision")
def clip_order(job):
    """Gradients are clipped after they are unscaled and averaged.

    Clip after scaler.unscale_(optimizer) and after the gradients are averaged.
    """
    clips = 0
    for number, row in enumerate(job.steps("gradients"), 1):
        for entries in zip(*(one["clipped"] for one in row), strict=False):
            clips, where = clips + 1, entries[0]["place"]
            if entries[0]["scaled"]:
                yield (
                    f"in step {number} clipped gradients still have the loss scale",
                    where,
                )
            before = [one["before"] for one in entries]
            if not alike(before) and alike([one["gradients"] for one in row]):
                yield f"in step {number} each rank clips its own gradient", where
    if not clips:
        raise NotChecked("no gradients are clipped")


@check(WRONG, read="03_gradients")
def zero_gradients(job):
    """Gradients are not zero.

    Call zero_grad() before backward(), and look whether the loss depends on the
    weights: the cross-entropy of one output, for example, is always 0.
    """
    if not job.of("step"):
        raise NotChecked("no optimizer took a step")
    for process in job.processes:
        steps = [one for one in process.of("step") if "gradients" in one]
        for number in {one["optimizer"] for one in steps}:
            own = [one for one in steps if one["optimizer"] == number]
            if len(own) > 1 and not any(any(one["gradients"]) for one in own):
                what = (
                    f"all gradients of rank {process.rank} are zero in {len(own)} steps"
                )
                yield what, own[0]["place"]


# --- modes and metrics ---


@check(RISK, read=16)
def eval_mode(job):
    """Networks train in training mode, and validate in evaluation mode.

    Call model.train() at the start of each epoch, and model.eval() before validation.

    Right if: dropout and batch norm are meant to work so.
    """
    evaluations = job.of("evaluation")
    numbers = {job.training(process) for process in job.processes}
    if not evaluations:
        raise NotChecked("no validation was seen")
    for one in job.of("step"):
        if one["training"] is False and any(x["stateful"] for x in evaluations):
            what = f"step {one['step'] + 1} trains a network in evaluation mode"
            yield what, one["place"]
    for one in evaluations:
        if one["training"] and one["stateful"] and ("hits" in one or not one["grad"]):
            if one["loader"] not in {*numbers, None}:
                what = f"rank {one['rank']} validates {one['network']} in training mode"
                yield what, one["place"]


@check(
    WRONG, "datasets_differ weights_differ learning_rates_differ not_averaged", read=16
)
def wrong_accuracy(job):
    """A printed accuracy counts each validation sample once.

    Add up right and all samples over the ranks, without those that DistributedSampler
    repeats, and divide once.

    Right if: the line is meant for one rank's samples.
    """
    names, places, order = Counter(), {}, {}
    known, passes = False, validations(job)
    for number, records in enumerate(passes):
        following = [
            x for x in passes[number + 1 :] if x[0]["step"] == records[0]["step"]
        ]
        after = [x for x in job.of("printed") if x["step"] == records[0]["step"]]
        after = [x for x in after if x["time"] > records[0]["time"]]
        union = [one for group in (records, *following) for one in group]
        rights = accuracies(records)[0], accuracies(union)[0]
        right, others = accuracies(records)
        found = [*values(after)]
        if any(abs(v - scale * x) <= gap for x in rights for _, v, gap, scale in found):
            known = True
            continue
        until = following[0][0]["time"] if following else float("inf")
        matches = {}
        for line, value, gap, scale in found:
            fit = [name for name, x in others.items() if abs(value - scale * x) <= gap]
            if line["time"] < until:
                matches |= {name: (line, value, scale * right) for name in fit}
        names.update(matches.keys())
        places, order = {**matches, **places}, {**order, **others}
    if names:  # the mistake that explains most validations
        name = max(order, key=names.__getitem__)
        line, value, true = places[name]
        what = f"rank {line['rank']} prints {value:g}, {name}"
        own = {"level": RISK if "only" in name else WRONG}
        yield f"{what}; each sample once gives {true:.4f}", line["place"], own
    if not known:
        raise NotChecked("no printed accuracy matches the outputs and labels")


def validations(job: Job) -> list[list[dict]]:
    """Records of networks that were validated: a list for each pass over a loader."""
    numbers, groups = {job.training(process) for process in job.processes}, {}
    for one in job.of("evaluation"):
        if "hits" in one and one["loader"] not in numbers - {None}:
            key = one["step"], one["loader"], one["epoch"]
            groups.setdefault(key, []).append(one)
    return [*groups.values()]


def values(lines: list[dict]) -> Iterator[tuple[dict, float, float, int]]:
    """Numbers that may be accuracies: line, number, rounding, and 1 or 100 (%)."""
    for line in lines:
        for text in re.findall(r"(?<![\w.])(\d+) ?%", line["text"]):
            yield line, float(text), 0.99, 100  # rounded, or cut off
        for word, text in re.findall(r"(\w*)\W*(?<![\w.])(\d+\.\d+)", line["text"]):
            digits = len(text.partition(".")[2])
            for scale, least in ((1, 3), (100, 1)):
                if digits >= least and "loss" not in word.lower():
                    yield line, float(text), 0.6 * 10**-digits, scale


def accuracies(records: list[dict]) -> tuple[float, dict[str, float]]:
    """The accuracy of a validation, and what mistakes make of it."""
    once, shares, batches = {}, {}, {}
    for number, one in enumerate(records):
        hits = [*one["hits"]]
        keys = one["indices"] or [(number, place) for place in range(len(hits))]
        once |= zip(keys, hits, strict=True)
        shares.setdefault(one["rank"], []).extend(hits)
        batches.setdefault(one["rank"], []).append(sum(hits) / len(hits))
    right = sum(once.values()) / len(once)
    own = {rank: sum(hits) / len(hits) for rank, hits in shares.items()}
    means = {rank: sum(parts) / len(parts) for rank, parts in batches.items()}
    every = sum(map(sum, shares.values()))
    found = {"which counts repeated samples": every / sum(map(len, shares.values()))}
    found["which counts repeated samples as right ones"] = every / len(once)
    found["the mean over the ranks of right ones, divided by all"] = (
        every / len(shares) / len(once)
    )
    found["the mean of the batches' accuracies"] = sum(means.values()) / len(means)
    found["the mean of the ranks' accuracies"] = sum(own.values()) / len(own)
    for rank, value in own.items():
        found[f"which counts the samples of rank {rank} only"] = value
        found[f"the mean over the batches of rank {rank} only"] = means[rank]
        found[f"right ones of rank {rank}, divided by all"] = sum(shares[rank]) / len(
            once
        )
    found["right ones of all ranks, divided by one rank's samples"] = sum(own.values())
    return right, {name: value for name, value in found.items() if value != right}


@check(RISK, "weights_differ not_averaged", read=16)
def buffers_differ(job):
    """All ranks validate a network with the same weights and buffers (batch norm).

    Broadcast the buffers from rank 0 before validation, or use SyncBatchNorm. Copy the
    weights of an average (EMA) after DDP has made those of all ranks equal.

    Right if: the difference does not matter to you.
    """
    several(job)
    rows = [p.of("evaluation") for p in job.processes]
    rows = [[x for x in row if x.get("state") and not x["training"]] for row in rows]
    if not all(rows):
        raise NotChecked("not every rank validates a network with weights of its own")
    for number, row in enumerate(zip(*rows, strict=False), 1):
        if not alike([one["state"] for one in row], 1e-4):
            what = f"in validation {number} the ranks' networks differ"
            yield what, row[0]["place"]


@check(
    RISK,
    "weights_differ not_averaged learning_rates_differ buffers_differ hangs "
    "ends_with_an_error",
    read=11,
)
def weights_differ_in_the_end(job):
    """All ranks end with the same weights.

    Look for what one rank does to its weights, and the others do not.

    Right if: only one rank's weights are used.
    """
    several(job)
    rows = [process.of("exit") for process in job.processes]
    last = [process.of("step")[-1:] for process in job.processes]
    if not all(rows) or not all(last) or len({one[0].get("which") for one in last}) > 1:
        raise NotChecked("not every rank trained to its end, with the same weights")
    weights = [row[-1]["weights"] for row in rows]
    if len({*map(len, weights)}) == 1 and not alike(weights, 1e-5):
        gap = max(max(values) - min(values) for values in zip(*weights, strict=True))
        what = f"in the end the weights of the ranks differ by up to {gap:.3g}"
        yield what, last[0][0]["place"]


# --- files ---


def saves(job: Job, key: str) -> list[dict]:
    """Calls of torch.save() that have a path, or weights."""
    if found := [one for one in job.of("save") if one[key]]:
        return found
    raise NotChecked(
        "torch.save() was not called with " + ("a " * (key == "path")) + key
    )


@check(WRONG, read=20)
def several_save(job):
    """One rank writes a file, not several.

    Save on rank 0 only.
    """
    paths = {}
    for one in [*saves(job, "path"), *job.of("rename")]:
        paths.setdefault(one["path"], {})[one["rank"]] = one["place"]
    for path, ranks in paths.items():
        if len(ranks) > 1:
            what = f"{os.path.basename(path)} is written by ranks {sorted(ranks)}"
            yield f"{what}, one into the other's file", min(ranks.values())


@check(RISK, "several_save", read=20)
def save_in_place(job):
    """A checkpoint does not overwrite the only old one while it is written.

    Write to another name, and then os.replace() the old one.

    Right if: there is an older one besides.
    """
    written = set()
    for one in saves(job, "path"):
        if one["there"] and one["path"] in written:
            name = os.path.basename(one["path"])
            what = (
                f"{name} is overwritten: a job that is killed meanwhile has lost both"
            )
            yield what, one["place"]
        written.add(one["path"])


@check(RISK, read=18)
def ddp_keys(job):
    """Saved weights have the names of the network without DDP.

    Save model.module.state_dict().

    Right if: only a wrapped network loads them.
    """
    for one in saves(job, "weights"):
        if one["wrapped"]:
            name = os.path.basename(one["path"] or "a file")
            yield f"the weights in {name} are named module.*", one["place"]


@check(RISK, read=18)
def no_optimizer(job):
    """A checkpoint to resume from has the optimizer's state.

    Save optimizer.state_dict(), too, and load it.

    Right if: nobody resumes from it.
    """
    for one in saves(job, "weights"):
        if one["counts"] and one["state"] and not one["optimizer"]:
            name = os.path.basename(one["path"] or "a file")
            what = (
                f"{name} has weights and a number of epochs or steps, but no optimizer"
            )
            yield what, one["place"]


@check(RISK, "hangs ends_with_an_error", read=15)
def schedule(job):
    """The schedule of the learning rate is as long as the training.

    Count the steps of one process: len(loader) times the number of epochs.

    Right if: the schedule is meant to be longer, or shorter.
    """
    several(job)
    process = job.processes[0]
    made, ends = process.of("schedule"), process.of("exit")
    if not made:
        raise NotChecked("no schedule of torch.optim.lr_scheduler is used")
    if not ends or not all(one["whole"] for one in process.of("end")):
        raise NotChecked("the job did not train to its end")
    for one, count in zip(made, ends[-1]["schedules"], strict=False):
        ratio = (one["planned"] or count) / max(1, count)
        if count and not 0.7 < ratio < 1.4:
            what = (
                f"{one['type']} is made for {one['planned']} steps, and takes {count}"
            )
            size = [job.world_size, 1 / job.world_size]
            why = ": they differ by the world size" * any(
                abs(ratio / x - 1) < 0.15 for x in size
            )
            yield what + why, one["place"]


# --- speed ---


@check(SLOW, "not_averaged", read="07_accumulation")
def every_micro_batch(job):
    """DDP averages gradients once in a step.

    Use model.no_sync() in all passes of a step but the last.
    """
    if not job.of("ddp"):
        raise NotChecked("DDP is not used")
    for row in job.steps("forwards"):
        passes, forwards = row[0]["passes"], row[0]["forwards"]
        places = {one["place"] for one in passes}
        if len(passes) > 1 and sum(forwards) >= len(passes) and len(places) == 1:
            what = f"DDP averages gradients {len(passes)} times in a step"
            yield what, passes[0]["place"]


@check(SLOW, read=10)
def unused_search(job):
    """DDP does not search for unused weights in vain.

    Leave it out.
    """
    if not job.of("ddp"):
        raise NotChecked("DDP is not used")
    steps = [one for one in job.of("step") if "missing" in one]
    for one in job.of("ddp")[:1]:
        if one["search"] and steps and not any(x["missing"] for x in steps):
            what = (
                f"find_unused_parameters=True, and {len(steps)} steps leave none unused"
            )
            yield what, one["place"]


@check(SLOW, read="performance")
def small_buckets(job):
    """DDP's buckets are large.

    Leave bucket_cap_mb at its default, 25.
    """
    if not job.of("ddp"):
        raise NotChecked("DDP is not used")
    for one in job.of("ddp")[:1]:
        if one["bucket"] < 2**20 and one["size"] > 4 * one["bucket"]:
            count, mib = one["size"] // one["bucket"], one["bucket"] / 2**20
            what = f"a step has about {count} all-reduces of buckets of {mib:.2g} MiB"
            yield what, one["place"]


@check(SLOW, read="performance")
def host_syncs(job):
    """No line makes the host wait for the device in each step.

    Add up on the device, and read the sum now and then.
    """
    found = job.of("syncs")
    if not found or found[0]["step"] < 5:
        raise NotChecked("too few steps were seen")
    steps, cuda = found[0]["step"], bool(gpus(job))
    often = {k: n for k, n in found[0]["places"].items() if n >= steps / 2}
    if often:
        what = " and ".join(f"{n} of {steps} steps have {k}" for k, n in often.items())
        own = {} if cuda else {"level": NOTE}
        what += "; on a GPU, each call waits" * (not cuda)
        yield what, next(iter(often)).rpartition(" in ")[2], own


@check(SLOW, read="performance")
def anomaly(job):
    """Autograd does not look for anomalies.

    Call torch.autograd.set_detect_anomaly() only to look for a mistake.
    """
    if not (steps := job.of("step")):
        raise NotChecked("no optimizer took a step")
    if found := [one for one in steps if one.get("anomaly")]:
        what = f"anomaly detection, which is slow, is on in {len(found)} steps"
        yield what, found[0]["place"]


@check(SLOW, read="performance")
def threads(job):
    """The processes do not start more compute threads than there are cores.

    Set OMP_NUM_THREADS to the number of cores divided by that of processes.
    """
    if gpus(job) or not job.of("step"):
        raise NotChecked("the job computes on GPUs, or takes no step")
    cores, count = len(os.sched_getaffinity(0)), job.of("step")[0]["threads"]
    if count * len(job.processes) > 1.5 * cores:
        what = f"{len(job.processes)} processes have {count} threads each"
        yield f"{what}, for {cores} cores", ""


@check(WRONG, read=19)
def same_gpu(job):
    """Each process has a GPU of its own.

    Call torch.cuda.set_device(local_rank).
    """
    devices = gpus(job)
    if not devices:
        raise NotChecked("the job computes on the CPU")
    local = job.processes[0].of("start")[0]["environment"].get("LOCAL_WORLD_SIZE")
    if len({*devices}) < len(devices) and local == str(len(devices)):
        yield f"the ranks use the GPUs {', '.join(map(str, devices))}", ""


@check(SLOW, read="performance")
def unpinned(job):
    """Batches for a GPU come from pinned memory.

    Use DataLoader(..., pin_memory=True) and .to(device, non_blocking=True).
    """
    if not gpus(job):
        raise NotChecked("the job computes on the CPU")
    for one in training(job)[:1]:
        if not one["pinned"]:
            yield "the copies of the training batches wait", one["place"]


PARTS = {  # of a step's time: how large it may be, and what to do then
    "data": (0.2, "Use more loader processes (num_workers), or decode faster."),
    "forward": (1, ""),
    "backward": (1, ""),
    "communication": (
        0.4,
        "Average once in a step, in large buckets; see the network.",
    ),
    "optimizer": (0.35, "Use the optimizer's fused or foreach form."),
    "validation": (0.2, "Validate once in an epoch."),
    "rest": (0.3, "Look at what the loop does besides: copies, prints, files."),
}


def times(process: Process) -> dict[str, float]:
    """Seconds of a step of one rank by part, from steps that are only timed."""
    every = process.of("step")[5:]
    steps = [one for one in every if "before" not in one]
    steps = steps if len(steps) > 4 else every  # a short job: those that were watched
    if len(steps) < 5:
        raise NotChecked("too few steps were seen: see --steps")
    found = {part: sum(x["parts"].get(part, 0) for x in steps) for part in PARTS}
    found["rest"] = max(0.0, sum(x["wall"] for x in steps) - sum(found.values()))
    return {part: seconds / len(steps) for part, seconds in found.items()}


@check(SLOW, "hangs", read="performance")
def bottleneck(job):
    """No part of a step takes more time than it should.

    Look for what that rank does more, or at its host.
    """
    rows, steps = [times(process) for process in job.processes], job.of("step")
    own = [sum(row.values()) - row["communication"] for row in rows]
    slow, found = max(range(len(own)), key=own.__getitem__), []
    others = [seconds for rank, seconds in enumerate(own) if rank != slow]
    waits = max(row["communication"] / sum(row.values()) for row in rows) > 0.15
    if others and waits and own[slow] > 1.3 * max(others) + 0.001:
        what = (
            f"rank {slow} needs {1000 * own[slow]:.0f} ms for its part of a step, and "
        )
        what += f"the others, with {1000 * max(others):.0f} ms, wait for it"
        found.append((1.0, what, {}))
    for part, (limit, mend) in PARTS.items():
        share = max(row[part] / sum(row.values()) for row in rows)
        often = sum(part in one["parts"] for one in steps) > len(steps) / 2
        if share > limit and often and not (found and part == "communication"):
            what = f"{part} is {share:.0%} of a step's time"
            found.append((share, what, {"mend": mend}))
    for _, what, given in sorted(found, key=lambda one: -one[0]):
        yield what, "", given


def time_table(job: Job) -> dict[int, dict[str, float]]:
    """By rank, seconds of a step by part; empty if too few steps were seen."""
    try:
        return {process.rank: times(process) for process in job.processes}
    except NotChecked:
        return {}
