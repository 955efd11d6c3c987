"""Determine which samples the ranks of a job read in each epoch."""

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, pairwise, permutations
from operator import eq
from statistics import fmean

from .draws import draws_in_steps
from .event import Event
from .job import Job
from .law import NotJudged, need
from .loaders import Batch, Epoch
from .neighbours import (
    Input,
    before_a_repeat,
    first_lap,
    inputs,
    named,
    recurring,
    redrawn,
    resumed,
)

EPOCHS = 20  # maximum number of epochs to judge
MORE = 0.02  # it is a breach if a larger share of samples is repeated or left out


class Feed(Event, limit=1000):
    """A loader's sampler at the start of a pass, and (in the first pass) its data."""

    loader: int
    epoch: int
    divides: bool  # it divides the samples between ranks
    shuffles: bool
    repeats: bool  # it draws with replacement
    sampler: dict[str, int]  # its seed, epoch, rank and num_replicas
    workers: int
    data: dict[str, tuple]  # see signature()
    part: array | None  # the samples that subsets choose
    fields: dict[str, float] = field(default_factory=dict)  # numbers in the dataset


@dataclass
class Reads:
    """The samples that all ranks read in an epoch, or in the part that doctor saw."""

    ranks: list[list[list[int]]]  # for each rank, the samples of each batch
    text: str  # such as "epoch 0"
    whole: bool = True
    total: int | None = None  # number of samples in the dataset
    feeds: list[Feed] = field(default_factory=list)
    index: bool = True  # samples are identified by indices, not by contents
    loader: int | None = None  # None: the training loader
    pool: int = 0  # without a DataLoader: number of distinct samples in all steps
    resumed: bool = False  # a resumed run read the epoch in two passes
    ids: bool = False  # without a DataLoader: the inputs are samples' indices
    redrawn: bool = False  # without a DataLoader: sampled with replacement
    later: bool = False  # without a DataLoader: these are not the first steps
    stream: bool = False  # `total` counts the samples of all epochs together
    shift: int = 0  # without a DataLoader: see shifted()

    @property
    def all(self) -> list[list[int]]:
        """The samples of each rank."""
        return [[x for batch in one for x in batch] for one in self.ranks]

    @property
    def batch(self) -> int:
        """The number of samples in the largest batch."""
        return max((len(x) for one in self.ranks for x in one), default=0)

    @property
    def slack(self) -> int:
        """How many samples may repeat, as padding or because a new epoch has begun."""
        unsure = not self.whole and not self.index
        return len(self.ranks) * (self.batch if unsure else 1)

    def vague(self) -> bool:
        """Return whether contents recur within a rank as often as between ranks.

        If they do, there are few distinct contents, as with discrete states. Return
        False if workers or ranks read all samples equally often.
        """
        own, every = [Counter(one) for one in self.all], Counter()
        for one in own:
            every += one
        within = sum(n * (n - 1) for one in own for n in one.values())
        chances = sum(n * (n - 1) for n in map(len, self.all))
        across = sum(n * (n - 1) for n in every.values()) - within
        others = every.total() * (every.total() - 1) - chances
        times, count = Counter(every.values()).most_common(1)[0]
        most = len(own) * max((x.workers for x in self.feeds), default=0)
        known = self.index or self.pool or self.redrawn
        if known or (1 < times <= most and count > 0.8 * len(every)):
            return False
        return 0.4 < within * others / max(1, chances * across) < 2.5

    def stays(self) -> bool:
        """Return whether inputs are as alike in different steps as in the same step."""
        alike = []
        for shift in (0, 1):
            pairs = [(a, b[shift:]) for a, b in combinations(self.ranks[:8], 2)]
            rows = [[shared(*x) for x in zip(*pair, strict=False)] for pair in pairs]
            alike.append(max((fmean(row) for row in rows if row), default=0))
        return alike[0] > 0.3 and alike[1] > 0.8 * alike[0]

    def computed(self) -> bool:
        """Return whether inputs recur within a loop's batches, as game states do."""
        lists = [x for one in self.ranks for x in one]
        repeats = sum(len(x) - len({*x}) for x in lists)
        return self.pool > 0 and repeats > MORE * sum(map(len, lists))

    def random(self) -> bool:
        """Return whether random draws on each rank may share as many samples.

        Such ranks repeat their own samples as often as they read another rank's. A
        series, such as a file, counts as one draw.
        """
        draws, ranks = 0, self.all[:8]
        for one, other in permutations(ranks, 2):
            where, most = {x: n for n, x in enumerate(other)}, len(other)
            spots = [-most, *(where.get(x, -most) for x in one)]
            draws += sum(b >= 0 and abs(a - b) > most / 3 for a, b in pairwise(spots))
        return self.pool > 0 and draws < 12 * len(ranks) and not self.shift

    def shifted(self) -> int:
        """Return by how many samples one rank is ahead of another in most steps, or 0.

        The result is at most one batch: ranks that begin at random are further apart.
        """
        for one, other in permutations([] if self.stays() else self.all[:8], 2):
            first = enumerate(one[: self.batch + 1])
            for shift in [n for n, x in first if x in other[:1] and n]:
                if sum(map(eq, one[shift:], other)) > 0.7 * len(one):
                    return shift
        return 0

    def together(self, least: float = 0.3) -> tuple[float, float]:
        """Return the share of steps in which two ranks read (nearly) the same samples.

        The second share is of steps in which one rank reads the other's next samples.
        """
        found = []
        for shift in (0, 1):
            shares = [0.0]
            for one, other in combinations(self.ranks[:8], 2):
                pairs = [*zip(one, other[shift:], strict=False)]
                alike = sum(shared(a, b) > least for a, b in pairs)
                shares.append(alike / max(1, len(pairs)))
            found.append(max(shares))
        return tuple(found)

    def read_by_all(self) -> bool:
        """Return whether each rank reads every sample."""
        both = set.intersection(*({*one} for one in self.all))
        return len(both) >= 0.99 * (self.total or 10**12)

    def numbers(self) -> dict[str, int]:
        """Return counts of samples; repeats in the last batches are not counted."""
        reads = [x for one in self.all for x in one]
        inner = [[x for batch in one[:-1] for x in batch] for one in self.ranks]
        inner = inner if self.whole and all(inner) else self.all
        ranks = Counter(x for one in inner for x in {*one})
        found = {"read": len(reads), "distinct": len({*reads})}
        found["ranks"] = sum(count > 1 for count in ranks.values())
        found["within"] = sum(len(one) - len({*one}) for one in inner)
        found["again"] = found["ranks"] + found["within"]
        found["missing"] = (self.total or 0) - len({*reads}) if self.whole else 0
        return found


def shared(one: list[int], other: list[int]) -> float:
    """Return the share of samples that are in both batches."""
    return len({*one} & {*other}) / max(1, min(len({*one}), len({*other})))


def feeds(job: Job, number: int | None = None, epoch: int = 0) -> list[Feed]:
    """Return each rank's Feed of a loader's pass (by default, the training loader)."""
    found = []
    for process in job.processes:
        key = process.training if number is None else number, epoch
        found += [x for x in process.of(Feed) if (x.loader, x.epoch) == key][:1]
    return found if len(found) == len(job.processes) else []


def interleaved(job: Job) -> tuple[list[int], list[int]]:
    """Return the other loaders whose batches the ranks read between the same steps.

    The second list has loaders that the training loader's line reads in other steps.
    """
    found, again = [], []
    for process in job.processes:
        steps, fed, line = {}, set(), process.loader()
        for one in process.of(Batch):
            steps.setdefault((one.loader, one.epoch), set()).add(one.step)
            fed |= {one.step} if one.loader == process.training else set()
        own = {key[0]: own for key, own in steps.items() if len(own) > 2}
        own.pop(process.training, None)
        lines = {number: process.loader(number).place for number in own}
        later = {x for x, y in own.items() if not y & fed and lines[x] == line.place}
        again.append(later)
        found.append({*own} - later)
    return sorted(set.intersection(*found)), sorted(set.union(*again))


def loaded(job: Job, number: int | None = None) -> Iterator[Reads]:
    """Yield the samples of each epoch of a loader (by default, the training loader)."""
    loader = number
    first = need(feeds(job, loader), "no DataLoader feeds the steps of every rank")
    same = all(one.data == first[0].data for one in first)
    own = job.processes[0].loader(loader)
    samples = own.samples
    if all(one.part is not None for one in first):
        samples = len({x for one in first for x in one.part})
    plain = own.sampler in ("RandomSampler", "SequentialSampler")
    if not (plain or all(one.divides for one in first)):
        samples = None  # the script's own sampler may choose a part of them
    lists = [process.epochs for process in job.processes]
    if loader is not None:
        passes = [[x for x in p.of(Epoch) if x.loader == loader] for p in job.processes]
        lists = [[one.epoch for one in own] for own in passes]
    epochs = [*zip(*lists, strict=False)]
    if len({*map(len, lists)}) > 1:  # a rank has no steps
        both = sorted(set.intersection(*map(set, lists)))
        epochs = [[number] * len(lists) for number in both]
    pairs = [[*zip(job.processes, one, strict=True)] for one in epochs]
    done = [all(p.whole(epoch, loader) for p, epoch in one) for one in pairs]
    lists = [[p.batches(epoch, loader) for p, epoch in one] for one in pairs]
    ids = named(job, loader) if own.stream else set()
    again = 0
    if sum(done) > 1 and own.stream:
        again = recurring([x for x, whole in zip(lists, done, strict=True) if whole])
        samples = len(ids) or again or samples
    before = lists
    lists, done = resumed(lists, done)
    for number, (batches, whole) in enumerate(zip(lists, done, strict=True)):
        text = f"epoch {number}"
        if number == EPOCHS or (number == len(lists) - 1 > 0 and not whole):
            return
        one = pairs[min(number, len(pairs) - 1)]
        ranks = [[x.ids if ids else x.indices for x in part] for part in batches]
        index = (same or bool(ids)) and not any(x is None for y in ranks for x in y)
        if not index:
            ranks = [[x.rows for x in part] for part in batches]
        if not all(ranks) or any(x is None for part in ranks for x in part):
            if number:
                return
            raise NotJudged("the samples of the batches are not known")
        if not whole:
            new = min(len(before_a_repeat(part)) for part in ranks)
            shortest = new if new >= 10 else min(map(len, ranks))
            shortest = min(shortest, first_lap(ranks, own.samples if index else 0))
            ranks = [x[:shortest] for x in ranks]
            text = f"{shortest} batches of {text}"
        used = []
        for process, epoch in one:
            key = process.training if loader is None else loader, epoch
            used += [x for x in process.of(Feed) if (x.loader, x.epoch) == key]
        total = samples if index or again else None
        found = Reads(ranks, text, whole, total, used, index)
        found.loader, found.stream = loader, own.stream
        if batches not in before:
            found.resumed, found.text = True, f"{text}, which a resume splits"
        yield found


def looped(job: Job) -> list[Reads]:
    """Return the samples that ranks read without a DataLoader, until a sample repeats.

    If all ranks have read equally many batches by then, the next batches form epoch 1.
    """
    if any(one.loaded for one in job.of(Input)):
        raise NotJudged("no DataLoader feeds the steps of every rank")
    if not draws_in_steps(job) and (found := redrawn(job)):
        return [Reads(found[0], found[1], False, index=False, redrawn=True)]
    lists = [[x.ids for x in one] for one in inputs(job)]
    ids = all(all(one) and len(before_a_repeat(one)) > 3 for one in lists)
    if not ids:
        lists = [[x.rows for x in one] for one in inputs(job)]
    ranks = [before_a_repeat(one) for one in lists]
    pool = len({x for one in lists for rows in one for x in rows})
    again = any(len(a) < len(b) for a, b in zip(ranks, lists, strict=True))
    shortest = min(map(len, ranks))
    rows = [[x for own in one for x in own] for one in zip(*lists, strict=False)]
    early = len(before_a_repeat(rows))
    read = {x for one in lists for rows in one[:early] for x in rows}
    if len(read) > 0.75 * pool:  # the ranks take turns with files: each reads all
        shortest = early
    whole = Reads(lists, "", False, index=False)
    if shortest < 8 and whole.together()[0] > 0.9:  # one random draw for all ranks
        ranks, shortest = lists, min(map(len, lists))
    elif shortest < 3 and again:
        raise NotJudged("samples repeat within 3 steps: they are not read in epochs")
    shift = whole.shifted()
    lap = partial(Reads, whole=False, index=False, pool=pool, ids=ids, shift=shift)
    for start in range(shortest, len(min(lists, key=len)) - 7, max(8, shortest)):
        own = [x[start : start + max(8, shortest)] for x in lists]
        text = f"steps {start + 1} to {start + min(map(len, own))}"
        one = lap(own, text, later=True)
        if one.together()[0] >= 0.9 and whole.together()[0] < 0.9:
            return [one]
    text = f"the first {shortest} inputs of the network"
    found = [lap([x[:shortest] for x in ranks], text)]
    end = min(map(len, lists)) if {*map(len, ranks)} == {shortest} and again else 0
    for start in range(shortest, end - shortest + 1, shortest):
        text = f"inputs {start + 1} to {start + shortest} of the network"
        one = lap([x[start : start + shortest] for x in lists], text)
        if one.numbers()["within"]:
            break  # they are not read in epochs
        found.append(one)
    return found


def broken(one: Reads) -> str:
    """Return what is wrong with the samples read in an epoch, or "" if nothing is."""
    counts, (together, near) = one.numbers(), one.together()
    number = max(map(len, one.ranks))
    if together >= 0.9 and near < 0.5 * together and not one.shift:
        same = f"{together * number:.0f} of {number}"
        return f"in {one.text}, {same} batches have the same samples on several ranks"
    text = f"in {one.text}, the ranks read {counts['read']:,} samples, "
    text += f"{counts['distinct']:,} distinct ones"
    more = " that all epochs have" * one.stream
    known = one.total and one.total > counts["distinct"] * one.stream
    text += f" of {one.total:,}{more}" if known else ""
    drawn = counts["within"] and not one.resumed or any(x.repeats for x in one.feeds)
    if one.index and drawn:
        return ""  # drawn with replacement
    if one.read_by_all():
        return f"in {one.text}, each rank reads all {one.total:,} samples"
    if counts["again"] > max(MORE * counts["read"], one.slack):
        text += f": {counts['ranks']:,} on several ranks" * bool(counts["ranks"])
        return text + f", {counts['within']:,} twice on a rank" * bool(counts["within"])
    workers = max((x.workers for x in one.feeds), default=0)
    last = len(one.ranks) * one.batch * max(1, workers)  # incomplete batches
    least = max(last, MORE * (one.total or 0))
    return text if counts["missing"] >= least else ""
