"""Law 2: ranks are exchangeable. Checks the targets of losses, and negative samples."""

from array import array
from itertools import chain, permutations

from ..event import Event
from ..law import RISK, Breach, Doubt, check, several
from ..loaders import Loaders
from ..moments import Step
from ..record import place, recorder, torch, wrap
from ..sample import digest, numbers
from ..watcher import Watcher
from .losses import children
from .ranks import LAW
from .samples import where

KEEPS = "Mul", "Div", "ToCopy", "View", "UnsafeView"  # functions that move no column


class Contrast(Event, limit=400):
    """A loss over all ranks' candidates, one of which is right for each sample."""

    first: int  # the first sample's target; the others are the next integers
    count: int  # number of samples, and of each rank's candidates
    place: str
    candidate: int = 0  # a hash of the first candidate, or 0 if it is unknown


class Candidates(Watcher):
    """Records the targets of contrastive losses."""

    def hooks(self) -> None:
        wrap(torch.nn.functional, "cross_entropy", self.loss)

    def loss(self, call, /, *args, **kwargs):
        """Record the targets if they are consecutive indices of candidates."""
        result = call(*args, **kwargs)
        joined = torch.distributed.is_initialized() and recorder.watching
        if not (joined and result.requires_grad and result.dim() == 0):
            return result
        scores, target = (*args, kwargs.get("target"))[:2]
        size, count = torch.distributed.get_world_size(), target.numel()
        fits = target.dim() == 1 and scores.shape == (count, size * count)
        if fits and size > 1 and count > 1 and not target.is_floating_point():
            if bool((target.diff() == 1).all()):
                own = {"first": int(target[0]), "candidate": first_candidate(scores)}
                recorder.write(Contrast(count=count, place=place(), **own))
        return result


class Pairs(Event, limit=200):
    """Hashes of a batch's pairs: of each sample's first integer and its others."""

    loader: int | None
    pairs: list[array]  # one hash per sample for the second integer, the third, ...


class Negatives(Watcher):
    """Records batches of several integers per sample, such as users and items."""

    def on_batch(self, own, batch, seconds) -> None:
        self.read(batch["tensors"], own.loader)

    def on_input(self, network, inputs) -> None:
        if Loaders.here.current is None and torch.is_grad_enabled():
            self.read(inputs, None)

    def read(self, tensors: list, loader: int | None) -> None:
        """Record pairs, if there are 3 to 8 integers per sample."""
        whole = [x for x in tensors if x.dtype in (torch.int32, torch.int64)]
        same = [x for x in whole if x.dim() in (1, 2) and len(x) == len(whole[0])]
        width = sum(x.size(1) if x.dim() == 2 else 1 for x in same)
        if recorder.watching and 2 < width < 9 and all(x.is_cpu for x in same):
            columns = torch.cat([x.reshape(len(x), -1) for x in same], 1).t().tolist()
            pairs = [map(hash, zip(columns[0], x, strict=True)) for x in columns[1:]]
            pairs = [array("q", own) for own in pairs]
            recorder.write(Pairs(loader=loader, pairs=pairs))


def first_candidate(scores) -> int:
    """Return a hash of the candidate that the first column of scores (N, M) is about.

    Return 0 unless the scores are the product of two matrices, times a constant.
    """
    nodes = [scores.grad_fn]
    for node in nodes:
        found = getattr(node, "_saved_mat2", None)
        if found is not None and found.size(-1) == scores.size(1):
            return digest(numbers([found[..., :1]]))
        if type(node).__name__.startswith(KEEPS):
            nodes += children(node)[: 9 - len(nodes)]
    return 0


@check(LAW, RISK, needs=[Contrast])
def same_targets(job):
    """The targets of a loss over all ranks' candidates do not depend on the rank.

    Add the index of the rank's first candidate: torch.arange(n) + rank * n.
    Not a mistake if: each rank puts its own candidates first.
    """
    rows = [row for row in job.rows(Contrast) if len({x.place for x in row}) == 1]
    same = [row for row in rows if len({x.first for x in row}) == 1]
    if len(same) < max(8, 0.9 * len(rows)):
        return
    one = same[0][0]
    text = f"the targets are {one.first} to {one.first + one.count - 1} on every rank"
    if any(not x.candidate == row[0].candidate != 0 for row in same for x in row):
        raise Doubt(f"{text}, which is right if each rank's own candidates come first")
    yield Breach(f"{text}, and the first candidate is the same one", one.place)


@check(LAW, RISK, needs=[Pairs, Step], read="lesson 4")
def other_positives(job):
    """Negative samples avoid a rank's own positive pairs, but not the other ranks'.

    Give every rank all known pairs (such as users and their items), and divide only the
    samples of the training.
    Not a mistake if: each rank's negatives are meant to be chosen by its own data.
    """
    several(job)
    ranks = []
    for process in job.processes:
        rows = [x.pairs for x in process.of(Pairs) if x.loader == process.training]
        ranks.append([{*chain(*own)} for own in zip(*rows, strict=False)])
    for a, b in permutations(range(min(map(len, ranks))), 2):
        known = set().union(*(own[a] for own in ranks))
        others = sum(len(own[b] & known - own[a]) for own in ranks)
        if others > 15 and not any(own[a] & own[b] for own in ranks):
            what = f"{others} pairs of integers 1 and {b + 2} of a sample are pairs of "
            what += f"integers 1 and {a + 2} on another rank, but none on the same rank"
            yield Breach(what, where(job))
            return
