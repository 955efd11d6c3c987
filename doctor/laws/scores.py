"""Law 7: printed results are true. Checks that metrics get matching labels."""

from collections import Counter, deque
from math import inf

from ..event import Event
from ..law import RISK, Breach, check
from ..loaders import leaves
from ..record import place, recorder, torch
from ..results import LABELS, both_of
from ..watcher import Watcher
from .printed import LAW


class Paired(Event, limit=400):
    """The script calls a metric of scikit-learn with this rank's outputs."""

    name: str
    place: str
    found: int  # number of outputs among the predictions
    apart: int  # number of these that are beside another sample's label


class Pairs(Watcher):
    """Compares a metric's labels with those that came with a network's inputs."""

    def __init__(self):
        self.batches = deque(maxlen=8)
        self.own, self.count = [], 0  # outputs and targets of the last pass
        self.last = None  # the loader's pass

    def on_batch(self, own, batch, seconds) -> None:
        key = batch["loader"], batch["epoch"], batch["number"]
        targets = [x for x in batch["tensors"] if x.numel() == len(x)]
        self.batches.append((key, targets))

    def on_output(self, network, outputs, batch) -> None:
        if torch.is_grad_enabled():
            self.own, self.count = [], 0
            return
        key = batch and (batch["loader"], batch["epoch"], batch["number"])
        targets = next((x for known, x in self.batches if known == key), ())
        one = next((x for x in leaves(outputs) if x.dim() and len(x)), None)
        if one is None or not targets or len(one) != len(targets[0]):
            return
        if self.last != key[:2]:
            self.own, self.count, self.last = [], 0, key[:2]
        scores = one.detach().reshape(len(one), -1).double()
        if scores.size(1) < 3 and self.count < LABELS:
            self.count += len(one)
            if scores.size(1) == 2:
                scores = torch.stack([scores[:, 1], scores.diff()[:, 0]], 1)
            self.own.append((scores, [x.reshape(-1).double() for x in targets]))

    def on_metric(self, name, args, kwargs, result) -> None:
        if not self.own or recorder.full(Paired):
            return
        truth, guesses = both_of(args, kwargs)
        fits = truth.dim() == 1 and truth.shape == guesses.shape
        if not (fits and 30 < len(truth) < LABELS):
            return
        outputs = torch.cat([x for x, _ in self.own])
        rows = zip(*(x for _, x in self.own), strict=False)
        columns = [torch.cat(x).tolist() for x in rows]
        truth, at = truth.tolist(), unique(guesses.tolist())
        for scores in (*outputs.t(), *outputs.t().sigmoid()):
            own = unique(scores.tolist())
            both = own.keys() & at.keys()
            if len(both) <= max(15, len(own) / 2):
                continue
            pairs = [(own[x], truth[at[x]]) for x in both]
            counts = [apart(column, truth, pairs) for column in columns]
            labels = [x for x in columns if len({*x}) > 1 and {*x} <= {*truth}]
            if labels or min(counts) == 0:
                which = {"name": name, "place": place()}
                one = Paired(**which, found=len(pairs), apart=int(min(counts)))
                recorder.write(one)
            return


def unique(values: list[float]) -> dict[str, int]:
    """Return {value, rounded: its index} for the values that occur once."""
    keys = [f"{x:.6g}" for x in values]
    counts = Counter(keys)
    return {x: n for n, x in enumerate(keys) if counts[x] == 1}


def apart(column: list, truth: list, pairs: list[tuple[int, float]]) -> float:
    """Return how many of the pairs (sample, label) do not fit a column of targets.

    The labels may be computed from the column, such as 1 - target. If most targets are
    different, these have to be the labels.
    """
    if len({*column}) > len(column) / 2:
        return sum(column[n] != x for n, x in pairs) if {*column} <= {*truth} else inf
    found = {}
    for n, x in pairs:
        found.setdefault(column[n], Counter())[x] += 1
    return len(pairs) - sum(max(one.values()) for one in found.values())


@check(LAW, RISK, needs=[Paired], read="pitfall 16")
def labels_apart(job):
    """A metric compares the networks' outputs with the labels of other samples.

    Gather outputs and labels in the same way: DistributedSampler changes the order of
    the samples.
    Not a mistake if: the labels are shuffled on purpose.
    """
    for one in job.of(Paired):
        if one.apart > max(8, 0.05 * one.found):
            what = f"rank {one.rank} calls {one.name}(), in which {one.apart} of "
            what += f"{one.found} of its outputs are beside another sample's label"
            yield Breach(what, one.place)
            return
