"""Find printed results in text, and decide what each number was computed from."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, zip_longest
from math import exp
from statistics import fmean

NUMBER = re.compile(
    r"(?<![\w.@-])(\d+\.\d+(?:e-\d+)?|\d+)(?![\w.]*\w)"
    r"(?:\s*(/|of|out of)\s*(\d+)(?![\w.]*\w))?\s*(%?)"
)
KINDS = {
    "top": r"(?:top|acc|prec|acc_top)[-@_ ]?([2-9]|10)(?![\d.])",
    "accuracy": r"acc(?:urac(?:y|ies))?(?![a-z])|top[-@_ ]?1|prec@1|correct|\bright\b",
    "error": r"(?<![a-z])err(?:or)?s?(?![a-z])|error rate",
    "perplexity": r"\bppl|perplexit",
    "loss": r"loss|\b(?:nll|bce|mse)\b|cross.entropy",
}
AFTER = re.compile(r"\W*(?:[a-z]+ ){0,2}?(right|correct|wrong)")
NEUTRAL = re.compile(r"\b(?:ema|avg|mean|is|was|of|at|rate|val|test|eval|train)\b|_")
SPLITS = re.compile(r"train|val|test|eval|dev")
BOTH = re.compile(rf"({SPLITS.pattern})\w*\s*([/|,&+]|and)\s*(?!\1)({SPLITS.pattern})")
BATCH = re.compile(r"\s*\(\s*(?:avg:? ?)?\d+\.\d+(?:e-?\d+)?\s*%?\s*\)")
NAME = re.compile(r"([a-z][\w@/.-]*)\W{1,6}$")
UNIT = re.compile(r"\s*(?:[mu]?s|secs?|seconds?|min|h|it/s|[kmg]i?b|\w+/\w+)(?!\w)")
SETTINGS = set(  # and measurements that do not depend on outputs
    """lr learning rate time wall elapsed took in after sec secs seconds ms s t
    speed eta fps throughput mem memory gb mb gib mib epoch step steps iter it norm
    gnorm grad scale temp temperature tau beta alpha sigma eps epsilon momentum
    decay wd seed version progress torch python cuda data""".split()
)
BAR = re.compile(r"\d%\|")  # a progress bar
BEST = "best", "final", "last", "max"  # results of an earlier pass

REPEATED = (
    "Count each sample once: leave out those that DistributedSampler repeats, or "
    "validate on range(rank, len(data), world_size)."
)
ONE_RANK = "Sum the numerator and the number of samples over all ranks; divide once."
MEANS = "Add up sums and sample counts, not means, and divide once at the end."
DIVISOR = "Divide by the number of samples (or batches) that were added up."
SIZES = "Multiply a batch's mean by the batch's size if you divide by all samples."
PARTS = "Print the loss before it is divided for the backward pass."
RESET = "Reset the metric (or the sums) at the start of each pass."


@dataclass
class Number:
    """A number in a printed line, which may be a result."""

    kind: str
    value: float
    gap: float  # the largest rounding error
    scale: float  # 1 or 100
    count: int | None  # the denominator, in a fraction such as 63/76
    split: str  # train, val, "any" (see results()), or "" if it is unknown
    text: str
    words: str  # the words before the number

    def turned(self, ratio: tuple[float, float]) -> float:
        """Return numerator / denominator in this number's unit, such as percent."""
        top, bottom = ratio
        value = top / bottom if bottom else float("nan")
        if self.kind == "error":
            value = 1 - value
        if self.kind == "perplexity":
            value = exp(value) if value < 50 else float("inf")
        return self.scale * value

    def equals(self, ratio: tuple[float, float]) -> bool:
        """Return whether numerator / denominator equals this number."""
        if self.count is not None:
            own = self.turned(ratio) * self.count
            return abs(self.count - ratio[1]) < 1e-6 and abs(self.value - own) < 1e-3
        value, limit = self.turned(ratio), self.gap + 2e-6 * self.value
        if self.scale == 100 and self.kind != "error" and ratio[0] > ratio[1] > 0:
            value = value if abs(self.value - value) <= limit else value / 100
        return abs(self.value - value) <= limit


def results(text: str) -> list[Number]:
    """Return the numbers of a line that may be results.

    In "loss 0.4 val_loss 0.5", the first number may also be a training loss.
    """
    found = [*numbers(text)]
    now = [x for x in found if not any(one in x.words for one in BEST)]
    split = {x.kind for x in now if x.split == "val"}
    for one in now:
        one.split = one.split or "any" * (one.kind in split)
    return found


def numbers(text: str) -> Iterator[Number]:
    """Yield the numbers in a line that may be accuracies, error rates or losses."""
    kind, split, end, low = "", "", 0, "" if BAR.search(text) else text.lower()
    found = [x for x in NUMBER.finditer(low) if "." in x[1] or x[2] or x[4]]
    for one, following in zip_longest(found, found[1:]):
        before, end = low[end : one.start()], one.end()
        rest = low[end : following.start() if following else None]
        digits, _, total, percent = one.groups()
        named = [(k, x) for k, p in KINDS.items() for x in re.finditer(p, before)]
        named = [(x.end(), "".join((k, *x.groups()))) for k, x in named]
        if known := SPLITS.findall(before):
            split = "train" if known[-1] == "train" else "val"
            split = "any" if BOTH.search(before) else split  # "Train/Val loss 0.3 0.4"
        inherits = "(" in before if total else before.strip() or percent
        inherits = inherits or (split == "any" and not total)
        if named or not inherits or re.search("[a-z]", NEUTRAL.sub("", before)):
            kind = max(named, default=(0, ""))[1]
        after = AFTER.match(rest)
        if not kind and after and (total or percent):
            kind = "error" if after[1] == "wrong" else "accuracy"
        value, number = float(digits), one[0].strip()
        if kind and total:
            yield Number(kind, value, 0, 1, int(total), split, number, before)
        if not kind or total or BATCH.match(low[end:]):
            continue  # BATCH: a batch's value, before the mean of all batches
        shares, places = kind[:3] in ("acc", "err", "top"), digits.partition(".")[2]
        if shares and (value > 100 or not (places or percent)):
            continue  # a count
        gap = 0.01 * value if "e" in digits else gap_of(digits)
        gap = 0.99 if shares and not places else gap  # rounded or truncated
        scale = 100 if shares and (percent or value > 1) else 1
        yield Number(kind, value, gap, scale, None, split, number, before)


def others(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each other number of a line that may be a result."""
    end, low, known = 0, text.lower(), False
    for one in NUMBER.finditer("" if BAR.search(text) else low):
        before, end = low[end : one.start()], one.end()
        kind = any(re.search(x, before) for x in KINDS.values())
        name, known = NAME.search(before), known or kind
        if not name or "." not in one[1] or UNIT.match(low[end:]):
            continue
        words = {*re.split(r"[\W_]+", name[1])}
        setting = words & SETTINGS or any(x.endswith("time") for x in words)
        inherits = known and not re.search("[a-z]", NEUTRAL.sub("", name[1]))
        if not (kind or inherits or setting):
            yield name[1], one[1]


@dataclass
class Group:
    """What doctor measured in one pass over a loader, for one network or one loss."""

    what: str
    source: int
    loader: int | None
    epoch: int | None
    step: int = 0  # the last step before the pass
    trains: bool = False
    total: int = 0  # number of the dataset's samples; 0: unknown
    parts: int = 1  # divisor of the loss before backward()
    means: bool = True  # False: the losses may contain sums
    training: bool = False  # it used dropout or batch norm layers in training mode
    guesses: dict = field(default_factory=dict)  # sample -> predicted class
    # Rank -> batches, as (sums, weights, the samples' keys)
    ranks: dict[int, list[tuple]] = field(default_factory=dict)
    times: dict[int, list[float]] = field(default_factory=dict)

    def began(self, rank: int) -> float:
        """Return when a rank (or else any rank) measured its first batch."""
        return min(self.times.get(rank) or chain(*self.times.values()))

    def running(self, rank: int, moment: float) -> bool:
        """Return whether a rank measured batches both before and after this moment."""
        own = self.times.get(rank, [moment])
        return min(own) < moment < max(own)

    def added(self, rank: int | None = None) -> tuple[float, float]:
        """Return the sums of values and of weights, for one rank or (None) for all."""
        own = self.ranks.values() if rank is None else [self.ranks[rank]]
        return pair(sums(chain(*own)))

    def top(self, count: int) -> "Group":
        """Return the group for top-`count` accuracies; `self` contains places()."""
        same = replace(self, what=f"top{count}", ranks={})
        for rank, rows in self.ranks.items():
            hits = [([0 <= x < count for x in own], *rest) for own, *rest in rows]
            same.ranks[rank] = hits
        return same

    def once(self) -> dict:
        """Return the sum and weight of each distinct sample."""
        found = {}
        for rows in self.ranks.values():
            for values, weights, keys in rows:
                found |= zip(keys, zip(values, weights, strict=True), strict=True)
        return found

    def right(self, line: str, rank: int) -> list[tuple[float, float]]:
        """Return the ratios that a correct script may print for this group."""
        once = self.once()
        found = [pair(once.values())]
        own = {key for row in self.ranks.get(rank, ()) for key in row[2]}
        alone = re.search(rf"\brank\W{{0,3}}{rank}\b|^\W*{rank}\]", line, re.I)
        if own and (alone or len(own) == len(once)):  # or it validates on all samples
            found.append(self.added(rank))
        if self.trains:
            found += self.averages(rank)
        return [(top * self.parts, bottom) for top, bottom in found]

    def averages(self, rank: int) -> Iterator[tuple[float, float]]:
        """Yield averages in a training pass, over one rank's batches and over all."""
        own = [self.ranks[rank]] if rank in self.ranks else []
        for rows in (*own, [*chain(*self.ranks.values())]):
            yield pair(sums(rows))
            last = accumulate(reversed(means(rows)))  # of the last batches
            yield from ((total, count) for count, total in enumerate(last, 1))
        yield fmean(means([rows[-1] for rows in self.ranks.values()])), 1

    def wrong(self, earlier: list["Group"]) -> Iterator[tuple]:
        """Yield each mistake's name, advice, numerator and denominator."""
        every, once, count = self.added(), pair(self.once().values()), len(self.ranks)
        samples = self.total or once[1]
        if self.parts > 1:
            name = f"which is divided by {self.parts}, as it is for backward()"
            rows = [every, *(x for n in self.ranks for x in self.averages(n))]
            yield from ((name, PARTS, top, bottom) for top, bottom in rows)
        name = "which counts repeated samples"
        yield name, REPEATED, *every
        yield f"{name} in the numerator only", REPEATED, every[0], once[1]
        each = {rank: means(rows) for rank, rows in self.ranks.items()}
        own = {n: self.added(n) for n in self.ranks}
        for rank, (top, bottom) in own.items():
            only = f"of rank {rank} only"
            yield f"which counts the samples {only}", ONE_RANK, top, bottom
            yield f"the mean over the batches {only}", ONE_RANK, fmean(each[rank]), 1
            yield f"the last batch {only}", ONE_RANK, each[rank][-1], 1
            if count > 1:
                yield f"the sum {only}, divided by all samples", DIVISOR, top, samples
                name = f"the sum of all ranks, divided by the samples {only}"
                yield name, DIVISOR, every[0], bottom
        parts = [([*chain(*self.ranks.values())], every[1], "")]
        parts += [(x, own[n][1], f" of rank {n} only") for n, x in self.ranks.items()]
        for rows, bottom, only in parts if self.means else ():
            name = f"the sum of the batches' means{only}, divided by the samples"
            yield from ((name, SIZES, sum(means(rows)), x) for x in (samples, bottom))
        both = fmean(map(fmean, each.values()))
        yield "the mean of the batches' means", MEANS, both, 1
        ratios = [top / (bottom or 1) for top, bottom in own.values()]
        yield "the mean of the ranks' means", MEANS, fmean(ratios), 1
        if count > 1:
            yield "the sum of the ranks' means", DIVISOR, sum(ratios), 1
            name = f"which is divided {count} times too often"
            yield name, DIVISOR, every[0] / count, once[1]
        if earlier:
            name = "which counts earlier passes, too"
            yield name, RESET, *pair(one.added() for one in (*earlier, self))
            for rank in self.ranks:
                rows = [one.added(rank) for one in earlier if rank in one.ranks]
                yield f"{name}, of rank {rank} only", RESET, *pair([*rows, own[rank]])


def gap_of(text: str) -> float:
    """Return the largest rounding error of a printed number."""
    return 0.6 * 10 ** -len(text.partition(".")[2])


def sums(rows: Iterable[tuple]) -> list[tuple[float, float]]:
    """Return the sums of each batch's values and weights."""
    return [(sum(values), sum(weights)) for values, weights, _ in rows]


def means(rows: Iterable[tuple]) -> list[float]:
    """Return the mean of each batch."""
    return [top / (bottom or 1) for top, bottom in sums(rows)]


def pair(values: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return the sum of all numerators and the sum of all denominators."""
    rows = [*values]
    return sum(top for top, _ in rows), sum(bottom for _, bottom in rows)
