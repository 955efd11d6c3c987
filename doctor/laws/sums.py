"""Law 7: printed results are true. Checks sums, and metrics of parts."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, pairwise
from statistics import fmean

from ..law import RISK, Breach, check, several
from ..loaders import Batch
from ..numbers import BEST, SPLITS, gap_of, others
from ..reads import Feed
from ..results import OTHER, Measured, Printed, Scored
from ..sample import digest
from .files import Opened
from .meeting import Call
from .printed import LAW

RATIOS = re.compile(r"\w*auc|auroc|auprc|rmse|r2|kappa|mcc")  # no means over samples
PER_CLASS = re.compile(r"m?iou|f1|precision|recall")  # nor are these, for each class
MEANS = re.compile("acc|zero|hamm|log|hinge|brier|mean|n?dcg|label|top|d2|expl|cov")
REWARDS = re.compile(r"scores?|rewards?|returns?")  # also of training
LOCAL = re.compile(
    r"(?i)\b(rank|local|own|this|shard|worker|proc|gpu|node|client|fold|agent)|^\W*\d+\]"
)
RANKS = "which is the mean of the ranks' own values"
Rows = list[tuple[Call, ...]]  # calls of collectives, one per rank


@check(LAW, RISK, needs=[Printed], read="pitfall 16")
def partial_metric(job):
    """A printed metric covers one rank's samples, or is a mean over parts of the data.

    Compute it from all ranks' predictions, or from counts that are summed over all
    ranks, such as a confusion matrix.
    Not a mistake if: it is meant to cover one rank, or to be a mean over these parts.
    """
    scores, found = [(one,) for one in job.of(Scored)], {}
    known = (collectives(job), averaged), (scores, scored), ([], alone(job))
    for rows, read in known:
        for (what, *_), count, text, line in explained(job, rows, read):
            same = [x.rank for x in job.of(Printed) if x.place == line.place]
            named = {*same} != {line.rank} or LOCAL.search(line.text)
            if not (named and "its own" in what):
                what = f"rank {line.rank} prints {text}, {what} ({count} prints)"
                found.setdefault((line.place, text), Breach(what, line.place))
    yield from found.values()


@check(LAW, RISK, needs=[Call, Feed], read="lesson 4")
def order_of_ranks(job):
    """Results are joined rank by rank, but a sampler has dealt the samples out in turn.

    Sample n is on rank n % world_size: use torch.stack(parts, 1).flatten(0, 1).
    Not a mistake if: nothing depends on the order of the results.
    """
    own, passes, calls = job.processes[0], defaultdict(list), defaultdict(list)
    dealt = {x.loader for x in own.of(Feed) if x.divides} - {own.training}
    for one in own.of(Batch):
        if one.loader in dealt and one.indices:
            passes[one.step, one.loader].append(one.indices)
    for one in own.of(Call):
        if "gather" in one.name:
            calls[one.step].append(one)
    for (step, _), batches in passes.items() if len(job.processes) > 1 else ():
        one, *others = calls[step] or [None]
        rows = [*chain(*batches)]
        in_turn = {b - a for a, b in pairwise(rows[:-1])} == {len(job.processes)}
        if one and one.joins and not others and in_turn and len(batches) > 1:
            # Each row has one or more numbers; the size of an object is not known
            if one.sent == "" or int(one.sent.split()[0]) % len(rows) == 0:
                what = f"rank 0 joins the ranks' results for {len(rows)} samples each"
                yield Breach(f"{what}, rank by rank", one.place)
                return


def evaluated(job) -> list[dict[int, list]]:
    """Return {step: (time, samples) of each evaluated batch} for each rank."""
    known, shares = any(one.rows for one in job.of(Batch)), []
    for process in job.processes:
        shares.append(defaultdict(list))
        for one in process.of(Measured):
            if one.what == "seen":
                shares[-1][one.after].append((one.at, one.guesses))
        for one in process.of(Batch):
            if one.loader != process.training:
                rows = one.rows if known else one.indices
                shares[-1][one.step].append((one.time, rows or ()))
    return shares


def collectives(job) -> Rows:
    """Return the collectives that all ranks call with small tensors."""
    rows = zip(*(process.of(Call) for process in job.processes), strict=False)
    return [row for row in rows if all(x.value is not None for x in row)]


def explained(job, rows: list, read: Callable) -> Iterator[tuple]:
    """Yield (explanation, count, last number, its line) for each explained place.

    `read(line, rank, rows)` gets the rows of a line's step that are older than the line
    and yields (which number, its text, possible explanations).
    """
    several(job)
    steps, sites = defaultdict(list), defaultdict(list)
    for row in rows:
        steps[row[0].step].append(row)
    for rank, process in enumerate(job.processes):
        for line in process.of(Printed):
            past = [x for x in steps[line.step] if max(y.time for y in x) < line.time]
            if rows and not past:
                continue
            for which, text, fits in read(line, rank, past):
                sites[rank, line.place, which].append((fits, text, line))
    for found in sites.values():
        names = set.intersection(*(fits for fits, _, _ in found))
        if names and len({text for _, text, _ in found}) > 1:
            yield min(names), len(found), *found[-1][1:]


def averaged(line: Printed, rank: int, rows: Rows) -> Iterator[tuple]:
    """Explain metrics as the mean of the ranks' own numbers."""
    for name, text in others(line.text):
        short = re.sub(r".*[_/]", "", name)
        each = PER_CLASS.fullmatch(short)
        if each or RATIOS.fullmatch(short):
            own = [x for x in rows if not (each and x[0].sent.startswith("1 x"))]
            fits = any(is_mean(x, text) for x in own)
            yield name, text, {(RANKS,)} if fits else set()


def is_mean(row: tuple[Call, ...], text: str) -> bool:
    """Return whether a printed number is the mean of the ranks' own numbers."""
    own = [x.value / max(1, int(x.sent.partition(" ")[0])) for x in row]
    whole = any("float" not in x.sent for x in row)
    apart = max(own) - min(own) > 2 * gap_of(text)
    return near([fmean(own)], text) and not whole and apart


def scored(line: Printed, rank: int, rows: list[tuple[Scored]]) -> Iterator[tuple]:
    """Explain metrics by scikit-learn's results for parts of the data."""
    groups, values = defaultdict(list), [one.value for (one,) in rows]
    for (one,) in rows:
        groups[one.name, one.place].append(one)
    for name, text in others(line.text):
        fits, split = set(), SPLITS.findall(line.text.partition(text)[0])
        for (call, _), every in groups.items() if split[-1:] != ["train"] else ():
            ranks = [[x for x in every if x.rank == n] for n in {x.rank for x in every}]
            own = [x.value for x in every]
            means = [fmean(x.value for x in one) for one in ranks]
            means += [fmean(means), fmean(own), fmean(own, [x.count for x in every])]
            pairs = chain(*map(pairwise, ranks))
            parts = all(y.passes == x.passes + 1 for x, y in pairs)  # one per batch
            parts = parts and len({x.truth for x in every}) > 1 and near(means, text)
            if parts and not MEANS.match(call) and not near(values, text):
                fits.add((f"which is the mean of {call}() over parts of the data",))
            rest = [x for x in every if x.rank != line.rank]
            own = [x for x in every if x.rank == line.rank and near([x.value], text)]
            if own and rest and not near([x.value for x in rest], text):
                large = own[-1].count >= 1.5 * max(x.count for x in rest)  # gathered
                if not large and own[-1].truth not in {x.truth for x in rest}:
                    fits.add((f"which is {call}() of its own samples only",))
        yield name, text, fits


def alone(job) -> Callable:
    """Return a function that explains metrics as those of one rank's own samples.

    The other ranks have evaluated others, and have sent it nothing since then.
    """
    writes = {(one.step, one.rank) for one in job.of(Opened)}
    shares = evaluated(job)

    def read(line: Printed, rank: int, _) -> Iterator[tuple]:
        texts = [x for x in others(line.text) if evaluates(line.text.lower(), *x)]
        past = [x for x in shares[rank][line.step] if x[0] < line.time]
        own, fits = {key for _, keys in past for key in keys}, set()
        if not (own and texts):
            return
        received = line.exchanged > min(at for at, _ in past)
        for n, one in enumerate(shares):
            keys = {key for _, keys in one[line.step] for key in keys}
            if n != rank:
                received |= not keys or len(own & keys) > 0.1 * len(own)
                received |= (line.step, n) in writes  # perhaps in a file
        if not received:
            what = f"which covers its own {len(own)} samples only"
            fits = {(what, digest(sorted(own)))}
        yield from ((name, text, fits) for name, text in texts)

    return read


def evaluates(line: str, name: str, text: str) -> bool:
    """Return whether a number is a result of the last evaluation, by its words."""
    before = line.partition(text)[0]
    split = SPLITS.findall(before)
    known = OTHER.search(f"{name} {text}") and (split or not REWARDS.fullmatch(name))
    best = any(x in before for x in BEST)
    return bool(known) and split[-1:] != ["train"] and not best


def near(values: Iterable[float], text: str) -> bool:
    """Return whether a printed number is one of the values, or its percentage."""
    rows = [n * x for x in values for n in (1, 100)]
    return any(abs(x - float(text)) < gap_of(text) for x in rows)
