"""Law 7: what is printed is true. Which labels a metric compares with predictions."""

import inspect
import sys
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ..event import Event
from ..law import RISK, Breach, check, need
from ..loaders import leaves
from ..record import place, quiet, recorder, wrap
from ..sample import hashes
from ..watcher import Watcher
from .printed import LAW, wrong_number

ROWS, BATCHES = 8, 100  # samples of a batch, and batches, that are looked up
LEAST = 20  # predictions
RIGHT = "metrics get predictions with labels that fit"


@dataclass(kw_only=True)
class Scored(Event):
    """A metric of scikit-learn has got predictions that the networks made here."""

    limit: ClassVar[int] = 200
    name: str
    count: int  # of these predictions
    wrong: int  # those that it compares with another label than their sample's
    place: str


class Pairs(Watcher):
    """Remembers a few predictions of each batch without gradients, and its tensors."""

    def __init__(self):
        self.batches, self.kept = deque(maxlen=8), deque(maxlen=BATCHES)

    def metric_hooks(self, metrics) -> None:
        for name in metrics.__all__:
            one = getattr(metrics, name)
            plain = inspect.isfunction(one)
            names = [*inspect.signature(one).parameters] if plain else []
            if names[:1] == ["y_true"]:
                wrap(metrics, name, partial(self.score, name))

    def on_batch(self, own, batch, seconds) -> None:
        import torch

        if "sklearn.metrics" in sys.modules and not torch.is_grad_enabled():
            few = [x[:ROWS].clone() for x in batch["tensors"] if x[:1].numel() <= 64]
            self.batches.append(({**own.which, "number": batch["number"]}, few))

    def on_output(self, network, outputs, batch) -> None:
        import torch

        if not self.batches or torch.is_grad_enabled() or not batch:
            return
        few = [x for key, x in self.batches if key.items() <= batch.items()]
        found = [x for x in leaves(outputs) if x.dim() and x.is_floating_point()][:1]
        if few and found and found[0][:1].numel() <= 64:
            self.kept.append((found[0][:ROWS].detach().clone(), few[0]))

    def score(self, name: str, call, /, *args, **kwargs):
        result = call(*args, **kwargs)
        if self.kept and len(args) > 1:
            quiet(self.look)(name, place(), *args[:2])
        return result

    def look(self, name: str, where: str, truth, scores) -> None:
        """Compare the labels that a metric gets with those of the same samples."""
        import torch

        labels, scores = hashes(torch.as_tensor(truth)), rounded(scores)
        given = dict(zip(scores, labels, strict=True))
        for change in (torch.clone, torch.sigmoid, softmax, last):
            known = {}
            for one, columns in self.kept:
                own = zip(*map(hashes, columns), strict=True)
                known |= dict(zip(rounded(change(one)), own, strict=True))
            known = {one: own for one, own in known.items() if one in given}
            wrong = []
            for column in zip(*known.values(), strict=True):
                if not Counter(column) - Counter(labels):  # they are such labels
                    pairs = zip(known, column, strict=True)
                    wrong.append(sum(given[one] != own for one, own in pairs))
            if len(known) >= LEAST and wrong:
                own = {"count": len(known), "wrong": min(wrong)}
                recorder.write(Scored(name=name, place=where, **own))
                return


def rounded(scores) -> list[int]:
    """Return hashes of rows that rounding errors do not change."""
    import torch

    return hashes((torch.as_tensor(scores).double() * 2**13).round() + 0.0)


def softmax(scores):
    """Return probabilities of classes."""
    return scores.softmax(-1)


def last(scores):
    """Return the last class's probability, as two classes need."""
    return scores.softmax(-1)[..., -1]


@check(LAW, RISK, needs=[Scored], causes=[wrong_number])
def other_samples_labels(job):
    """A metric compares predictions with the labels of other samples.

    Gather the labels with the predictions. A DistributedSampler deals every N-th sample
    to a rank: torch.stack(parts, 1).flatten(0, 1) has the data set's order if no
    sample was shuffled.
    """
    for one in need([x for x in job.of(Scored) if x.wrong > x.count / 10], RIGHT):
        what = f"{one.name}() gets {one.wrong} of {one.count} of rank {one.rank}'s "
        what += "predictions with a label that is not their sample's"
        yield Breach(what, one.place)
        return
