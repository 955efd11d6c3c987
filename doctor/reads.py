"""Determine which samples the ranks of a job read in each epoch."""

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, combinations, compress, pairwise, permutations
from operator import eq
from statistics import fmean

from .event import Event
from .job import Job
from .law import NotJudged, need
from .loaders import Batch, Epoch
from .neighbours import Input, before_a_repeat, contents, inputs

EPOCHS = 20  # maximum number of epochs to judge
PLAIN = "RandomSampler", "SequentialSampler"
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
    later: bool = False  # without a DataLoader: these are not the first steps
    stream: bool = False  # `total` counts the samples of all epochs together
    shift: int = 0  # without a DataLoader: see shifted()

    @property
    def all(self) -> list[list[int]]:
        """The samples of each rank."""
        return [[*chain(*one)] for one in self.ranks]

    @property
    def batch(self) -> int:
        """The number of samples in the largest batch."""
        return max(map(len, chain(*self.ranks)), default=0)

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
        own = [Counter(one) for one in self.all]
        every = sum(own, Counter())
        times, count = Counter(every.values()).most_common(1)[0]
        most = len(own) * max((x.workers for x in self.feeds), default=0)
        known = self.index or self.pool
        if known or (1 < times <= most and count > 0.8 * len(every)):
            return False
        within = sum(map(pairs, chain(*(one.values() for one in own))))
        across = sum(map(pairs, every.values())) - within
        chances = sum(pairs(one.total()) for one in own)
        others = pairs(every.total()) - chances
        return 0.4 < within * others / max(1, chances * across) < 2.5

    def stays(self) -> bool:
        """Return whether inputs are as alike in different steps as in the same step."""
        now, later = self.together()
        return later > 0.8 * now > 0

    def computed(self) -> bool:
        """Return whether inputs recur within a loop's batches, as game states do."""
        repeats = sum(len(x) - len({*x}) for x in chain(*self.ranks))
        return self.pool > 0 and repeats > MORE * sum(map(len, self.all))

    def repeated(self) -> bool:
        """Return whether a sampler repeats samples in a batch, differently per rank."""
        repeats = sum(len(x) - len({*x}) for x in chain(*self.ranks))
        unlike = any(one != self.ranks[0] for one in self.ranks)
        return self.index and unlike and repeats > 0.2 * sum(map(len, self.all))

    def random(self) -> bool:
        """Return whether random draws on each rank may share as many samples.

        Then they repeat their own as often. A series, as of a file, counts as one draw.
        """
        draws, ranks = 0, self.all[:8]
        for one, other in permutations(ranks, 2):
            where, most = {x: n for n, x in enumerate(other)}, len(other)
            spots = [-most, *(where.get(x, -most) for x in one)]
            draws += sum(b >= 0 and abs(a - b) > most / 3 for a, b in pairwise(spots))
        return self.pool > 0 and draws < 12 * len(ranks) and not self.shift

    def shifted(self) -> int:
        """Return by how many samples, at most one batch, a rank is mostly ahead."""
        for one, other in permutations([] if self.stays() else self.all[:8], 2):
            first = enumerate(one[: self.batch + 1])
            for shift in [n for n, x in first if x in other[:1] and n]:
                likes = [sum(map(eq, one[shift:], own)) for own in (other, one)]
                if likes[0] - likes[1] > 0.7 * len(one):
                    return shift
        return 0

    def together(self, least: float = 0.3) -> tuple[float, float]:
        """Return the share of steps in which two ranks read (nearly) the same samples.

        The second share is of steps in which one rank reads the other's next samples.
        """
        found = []
        for shift in (0, 1):
            ranks = combinations(self.ranks[:8], 2)
            rows = [[*map(shared, one, other[shift:])] for one, other in ranks]
            shares = [fmean(x > least for x in row) for row in rows if row]
            found.append(max(shares, default=0))
        return tuple(found)

    def read_by_all(self) -> bool:
        """Return whether each rank reads all samples, except an incomplete batch."""
        both, total = len(set.intersection(*map(set, self.all))), self.total or 10**12
        return both >= 0.8 * total and both + len(self.ranks) * self.batch > total

    def numbers(self) -> dict[str, int]:
        """Return counts of samples; repeats in the last batches are not counted."""
        inner = [[*chain(*one[:-1])] for one in self.ranks]
        inner = inner if self.whole and all(inner) else self.all
        own, every = [{*one} for one in inner], [*chain(*self.all)]
        ranks = sum(count > 1 for count in Counter(chain(*own)).values())
        within, distinct = sum(map(len, inner)) - sum(map(len, own)), len({*every})
        missing = (self.total or 0) - distinct if self.whole else 0
        found = {"read": len(every), "distinct": distinct, "missing": missing}
        return found | {"ranks": ranks, "within": within, "again": ranks + within}


def shared(one: list[int], other: list[int]) -> float:
    """Return the share of samples that are in both batches."""
    return len({*one} & {*other}) / max(1, min(len({*one}), len({*other})))


def pairs(count: int) -> int:
    """Return the number of ordered pairs of different things."""
    return count * (count - 1)


def feeds(job: Job, number: int | None = None, epoch: int = 0) -> list[Feed]:
    """Return each rank's Feed of a loader's pass (by default, the training loader)."""
    found = []
    for process in job.processes:
        key = process.training if number is None else number, epoch
        found += [x for x in process.of(Feed) if (x.loader, x.epoch) == key][:1]
    return found if len(found) == len(job.processes) else []


def interleaved(job: Job) -> tuple[list[int], list[int]]:
    """Return other loaders: read between the same steps, and at its line in others."""
    found, again = [], []
    for process in job.processes:
        passes, fed, line = {}, set(), process.loader().place
        for one in process.of(Batch):
            if one.loader == process.training:
                fed.add(one.step)
            else:
                passes.setdefault((one.loader, one.epoch), set()).add(one.step)
        steps = {number: own for (number, _), own in passes.items() if len(own) > 2}
        same = {x for x in steps if process.loader(x).place == line}
        again.append({x for x in same if not steps[x] & fed})
        found.append({*steps} - again[-1])
    return sorted(set.intersection(*found)), sorted(set.union(*again))


def loaded(job: Job, number: int | None = None) -> Iterator[Reads]:
    """Yield the samples of each epoch of a loader (by default, the training loader)."""
    first = need(feeds(job, number), "no DataLoader feeds the steps of every rank")
    own = job.processes[0].loader(number)
    same = all(one.data == first[0].data for one in first)
    passes = [
        [x.epoch for x in p.of(Epoch) if x.loader == number] or p.epochs
        for p in job.processes
    ]
    epochs = [[*zip(job.processes, x, strict=True)] for x in zip(*passes, strict=False)]
    done = [all(p.whole(epoch, number) for p, epoch in one) for one in epochs]
    lists = [[p.batches(epoch, number) for p, epoch in one] for one in epochs]
    samples = own.samples
    if own.stream:
        samples = recurring([*compress(lists, done)])
    elif own.sampler not in PLAIN and not all(one.divides for one in first):
        samples = None  # the script's own sampler may choose a part of them
    elif all(one.part is not None for one in first):
        samples = len({*chain(*(one.part for one in first))})
    # A dataset may grow, as in active learning
    begun = [x for x in job.processes[0].of(Epoch) if x.loader == own.loader]
    all_samples = samples == own.samples and not own.stream
    now = {x.epoch: x.samples for x in begun if all_samples}
    before = lists
    lists, done = resumed(lists, done)
    for count, (batches, whole) in enumerate(zip(lists, done, strict=True)):
        if count == EPOCHS or (count == len(lists) - 1 > 0 and not whole):
            return
        text = f"epoch {count}"
        ranks = [[x.indices for x in part] for part in batches]
        index = same and None not in chain(*ranks)
        if not index:
            ranks = [[x.rows for x in part] for part in batches]
        if not all(ranks) or None in chain(*ranks):
            if count:
                return
            raise NotJudged("the samples of the batches are not known")
        if not whole:
            new = min(len(before_a_repeat(part)) for part in ranks)
            shortest = new if new >= 10 else min(map(len, ranks))
            shortest = min(shortest, first_lap(ranks, own.samples if index else 0))
            ranks = [x[:shortest] for x in ranks]
            text = f"{shortest} batches of {text}"
        split, epoch = batches not in before, epochs[count][0][1]
        yield Reads(
            ranks,
            f"{text}, which a resume splits" if split else text,
            whole,
            total=now.get(epoch, samples) if index or own.stream else None,
            feeds=feeds(job, number, epoch) or first,
            index=index,
            loader=number,
            resumed=split,
            stream=own.stream,
        )


def recurring(epochs: list) -> int:
    """Return the number of a stream's distinct contents, or 0 if most do not recur."""
    sets = [{x for p in one for b in p for x in b.rows or ()} for one in epochs]
    count = Counter(x for own in sets for x in own)
    return len(count) if sum(n > 1 for n in count.values()) >= len(count) / 2 else 0


def first_lap(ranks: list, total: int | None) -> int:
    """Return how many batches an endless loader needs to read every sample once."""
    reads = [x for own in ranks for batch in own for x in batch]
    distinct = len({*reads})
    size = distinct if len(reads) >= 2 * distinct else total or len(reads)
    each = accumulate(sum(map(len, row)) for row in zip(*ranks, strict=False))
    return max(sum(count <= size for count in each), 1)


def resumed(lists: list, done: list[bool]) -> tuple[list, list[bool]]:
    """Join the two parts of an epoch that a resumed run has read in two passes."""
    most = max((len(one[0]) for one in lists), default=0)
    found, whole = [], []
    for one, end in zip(lists, done, strict=True):
        if found and not whole[-1] and len(found[-1][0]) + len(one[0]) == most:
            found[-1] = [a + b for a, b in zip(found[-1], one, strict=True)]
            whole[-1] = True
        else:
            found.append(one)
            whole.append(end)
    return found, whole


def looped(job: Job) -> list[Reads]:
    """Return the samples read without a DataLoader until a repeat, and later epochs."""
    if any(one.loaded for one in job.of(Input)):
        raise NotJudged("no DataLoader feeds the steps of every rank")
    lists = contents(job)
    ids = lists[0][0] is inputs(job)[0][0].indices
    whole = Reads(lists, "", False, index=False)
    ranks = [before_a_repeat(one) for one in lists]
    shortest, end = min(map(len, ranks)), min(map(len, lists))
    again = any(len(a) < len(b) for a, b in zip(ranks, lists, strict=True))
    early = before_a_repeat([[*chain(*row)] for row in zip(*lists, strict=False)])
    pool, distinct = len({*chain(*whole.all)}), len({*chain(*early)})
    if distinct > 0.75 * pool:  # each rank reads all files, in turns
        shortest = len(early)
    if shortest < 8 and whole.together()[0] > 0.9:  # one random draw for all ranks
        ranks, shortest = lists, end
    elif shortest < 3 and again:
        raise NotJudged("samples repeat within 3 steps: they are not read in epochs")
    shift = whole.shifted()
    lap = partial(Reads, whole=False, index=False, pool=pool, ids=ids, shift=shift)
    text = f"the first {shortest} inputs of the network"
    found = [lap([x[:shortest] for x in ranks], text)]
    epochs = distinct == pool or (again and {*map(len, ranks)} == {shortest})
    size = shortest if epochs else max(8, shortest)
    for start in range(shortest, end - min(8, size) + 1, size):
        own = [x[start : start + size] for x in lists]
        count = min(map(len, own))
        one = lap(own, f"steps {start + 1} to {start + count}")
        if one.together()[0] >= 0.9 > whole.together()[0]:
            one.later = True
            return [one]
        epochs = epochs and not one.numbers()["within"]
        found += [one] * epochs
    return found


def broken(one: Reads) -> str:
    """Return what is wrong with the samples read in an epoch, or "" if nothing is."""
    counts, together = one.numbers(), one.together()[0]
    number = max(map(len, one.ranks))
    if together >= 0.9 and not one.stays() and not one.shift:
        same = f"{together * number:.0f} of {number}"
        return f"in {one.text}, {same} batches have the same samples on several ranks"
    drawn = counts["within"] and not one.resumed or any(x.repeats for x in one.feeds)
    if one.index and drawn:
        return ""  # drawn with replacement
    if one.read_by_all():
        least = min(len({*own}) for own in one.all)
        return f"in {one.text}, each rank reads {least:,} of {one.total:,} samples"
    text = f"in {one.text}, the ranks read {counts['read']:,} samples, "
    text += f"{counts['distinct']:,} distinct ones"
    if one.total and one.total > counts["distinct"] * one.stream:
        text += f" of {one.total:,}" + " that all epochs have" * one.stream
    if counts["again"] > max(MORE * counts["read"], one.slack):
        text += f": {counts['ranks']:,} on several ranks" * bool(counts["ranks"])
        return text + f", {counts['within']:,} twice on a rank" * bool(counts["within"])
    workers = max((x.workers for x in one.feeds), default=0)
    last = len(one.ranks) * one.batch * max(1, workers)  # incomplete batches
    return text if counts["missing"] >= max(last, MORE * (one.total or 0)) else ""
