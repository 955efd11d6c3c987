"""Law 2: ranks are exchangeable. Checks the targets of contrastive losses."""

from statistics import fmean

from ..event import Event
from ..law import RISK, Breach, Doubt, check, several
from ..record import place, recorder, torch, wrap
from ..sample import numbers
from ..watcher import Watcher
from .ranks import LAW


class Contrast(Event, limit=400):
    """A loss over all ranks' candidates, one of which is right for each sample."""

    first: int  # the first sample's target; the other targets follow
    count: int  # number of samples, and of each rank's candidates
    loss: float
    place: str


class Candidates(Watcher):
    """Records the targets of contrastive losses."""

    def __init__(self):
        self.pending = []

    def hooks(self) -> None:
        wrap(torch.nn.functional, "cross_entropy", self.loss)

    def loss(self, call, /, *args, **kwargs):
        result = call(*args, **kwargs)
        if recorder.watching and result.requires_grad and result.dim() == 0:
            self.look(result, *args[:2])
        return result

    def look(self, result, scores, target) -> None:
        """Record the targets if they are consecutive indices of candidates."""
        dist = torch.distributed
        size = dist.get_world_size() if dist.is_initialized() else 1
        fits = target.dim() == 1 and scores.shape == (len(target), size * len(target))
        if fits and size > 1 and len(target) > 1 and not target.is_floating_point():
            steps = torch.arange(len(target), device=target.device)
            if torch.equal(target - target[0], steps):
                entry = int(target[0]), len(target), result.detach(), place()
                self.pending.append(entry)

    def on_step(self, optimizer, weights, gradients) -> None:
        pending, self.pending = self.pending, []
        losses = numbers([one[2] for one in pending], 1)
        for (first, count, _, where), (loss,) in zip(pending, losses, strict=True):
            recorder.write(Contrast(first=first, count=count, loss=loss, place=where))


# --- checks ---


@check(LAW, RISK, needs=[Contrast])
def same_targets(job):
    """The targets of a loss over all ranks' candidates do not depend on the rank.

    Add the index of the rank's first candidate: torch.arange(n) + rank * n.
    Not a mistake if: each rank puts its own candidates first.
    """
    several(job)
    rows = [row for row in job.rows(Contrast) if len({x.place for x in row}) == 1]
    same = [row for row in rows if len({x.first for x in row}) == 1]
    if len(same) < max(8, 0.9 * len(rows)):
        return
    later, one = same[len(same) // 2 :], same[0][0]
    losses = [[x.loss for x in row] for row in later]
    means = [fmean(own) for own in zip(*losses, strict=True)]
    above = sum(min(row[1:]) > row[0] for row in losses)
    text = f"the targets are {one.first} to {one.first + one.count - 1} on every rank, "
    text += f"among the {one.count * len(same[0])} candidates of all ranks"
    if above < 0.75 * len(later) or min(means[1:]) < 1.05 * means[0]:
        raise Doubt(f"{text}, which is right if each rank's own candidates come first")
    told = ", ".join(f"{x:.3g} on rank {n}" for n, x in enumerate(means[:4]))
    yield Breach(f"{text}, and the later losses are {told}", one.place)
