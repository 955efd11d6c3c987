"""Law 7: printed accuracies and losses equal those of the networks' outputs. Ratios."""

import re
import weakref
from collections import Counter
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import ClassVar

from ..event import Event
from ..law import RISK, Breach, check, several
from ..moments import runs_normally
from ..record import recorder, wrap
from ..results import Printed
from ..sample import numbers
from ..watcher import Watcher
from .printed import LAW

FEW = 64  # numbers in a ratio that is looked at
MOST = 1000  # divisions, and 50 of a line's reductions


@dataclass(kw_only=True)
class Ratio(Event):
    """A collective adds up ratios of each rank, or their mean."""

    limit: ClassVar[int] = 300
    tops: list[float]
    bottoms: list[float]
    sent: list[float]
    place: str


class Ratios(Watcher):
    """Remembers what small tensors were divided by without gradients."""

    def __init__(self):
        self.divided, self.count, self.lines = [], 0, Counter()

    def hooks(self) -> None:
        import torch

        for owner, name in ((torch.Tensor, "__truediv__"), (torch.Tensor, "div")):
            wrap(owner, name, self.divide)

    def divide(self, call, /, *args, **kwargs):
        import torch

        result = call(*args, **kwargs)
        if torch.is_grad_enabled() or self.count > MOST or len(args) != 2:
            return result
        both = all(isinstance(x, torch.Tensor) for x in args)
        if both and 0 < args[0].numel() == result.numel() <= FEW and runs_normally():
            self.count += 1
            parts = [x.detach().expand_as(result).clone() for x in args]
            self.divided = [*self.divided[-3:], (weakref.ref(result), *parts)]
        return result

    def on_collective(self, name, args, kwargs, where) -> None:
        if name != "all_reduce" or not args or not self.divided:
            return
        self.lines[where] += 1
        if args[0].numel() > FEW or self.lines[where] > 50:
            return
        for result, top, bottom in reversed(self.divided):
            if result() is args[0] or args[0].numel() == 1:
                tops, bottoms, sent = numbers([top, bottom, args[0]], FEW)
                one = Ratio(tops=tops, bottoms=bottoms, sent=sent, place=where)
                if alike(sent, one):
                    recorder.write(one)
                    return

    def on_input(self, network, inputs) -> None:
        self.divided = []


def ratios(tops: list[float], bottoms: list[float]) -> list[float]:
    """Return finite ratios."""
    found = [a / b for a, b in zip(tops, bottoms, strict=True) if b]
    return [x for x in found if isfinite(x)]


def alike(sent: list[float], one: Ratio) -> bool:
    """Return whether numbers are ratios, or their mean."""
    own = ratios(one.tops, one.bottoms)
    wanted = own if len(sent) == len(own) > 1 else [fmean(own or [0])]
    pairs = zip(sent, wanted, strict=False)
    return len(sent) == len(wanted) and all(
        abs(a - b) <= 1e-5 * abs(b) for a, b in pairs
    )


# --- checks ---


@check(LAW, RISK, read="pitfall 16")
def mean_of_ratios(job):
    """A printed ratio is the mean of the ranks' ratios, which have other denominators.

    Sum the numerators and the denominators (such as confusion matrices) over all ranks,
    and divide once.
    Not a mistake if: each rank's ratio is meant to count alike.
    """
    several(job)
    found, lines = [], job.of(Printed)
    for row in job.rows(Ratio):
        if len({(len(one.tops), len(one.sent)) for one in row}) > 1:
            continue
        lists = [one.tops for one in row], [one.bottoms for one in row]
        whole = ratios(*([sum(x) for x in zip(*y, strict=True)] for y in lists))
        means = [fmean(x) for x in zip(*(one.sent for one in row), strict=True)]
        pairs = [*zip(means, whole, strict=False)] if len(means) == len(whole) else []
        pairs += [(fmean(means), fmean(whole or [0]))]
        own = [x for x in lines if x.step == row[0].step and x.time > row[0].time]
        hits = [(x, *hit) for x in own for hit in printed(x.text, pairs)]
        found += [(row[0], hits)] if hits else []
    if sum(len(hits) for _, hits in found) > 1:
        one, hits = found[0]
        line, text, right = hits[0]
        what = f"rank {line.rank} prints {text}, the mean of the ranks' ratios, which "
        what += f"have different denominators; the ratio of the sums is {right:.4g} ("
        yield Breach(f"{what}{len(found)} times)", one.place)


def printed(text: str, pairs: list[tuple[float, float]]) -> list[tuple[str, float]]:
    """Return the numbers of a line that are wrong values, and the right ones."""
    found = []
    for digits in re.findall(r"(?<![\w.])\d+\.\d{2,}", text):
        gap, value = 0.6 * 10 ** -len(digits.partition(".")[2]), float(digits)
        for wrong, right in pairs:
            for scale in (1, 100):
                off = abs(value - scale * wrong), abs(value - scale * right)
                if off[0] < gap and off[1] > 4 * gap:
                    found.append((digits, scale * right))
    return found
