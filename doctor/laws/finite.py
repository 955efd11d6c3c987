"""Law 6: every weight lives. Losses that are not numbers."""

from math import isfinite

from ..law import NOTE, WRONG, Breach, check
from .alive import LAW
from .ranks import Measured

LOSS = "loss of "


@check(LAW, WRONG)
def loss_is_not_finite(job):
    """A loss becomes infinite or NaN.

    Look at this step's batch for an empty one, a logarithm of 0, a division by 0 or a
    wrong label. If the loss grew in the steps before, lower the learning rate.
    """
    found = []
    for process in job.processes:
        series = {}
        for one in process.of(Measured):
            for name, value in one.values.items():
                if name.startswith(LOSS):
                    series.setdefault(name, []).append((one.step, value))
        for name, rows in series.items():
            bad = [row for row in rows if not isfinite(row[1])]
            if bad:
                stays = len(bad) > 2 and bad == rows[-len(bad) :]
                found.append((*bad[0], process.rank, name.removeprefix(LOSS), stays))
    if found:
        step, value, rank, place, stays = min(found)
        ranks = sorted(x[2] for x in found if x[0] == step and x[3] == place)
        who = "every rank" if len(ranks) == len(job.processes) else f"rank {ranks[0]}"
        who += " only" if len(ranks) == 1 < len(job.processes) else ""
        what = f"the loss is {value} on {who} in step {step + 1}"
        what += " and in all later ones" if stays else ", but not in all later ones"
        yield Breach(what, place, level="" if stays else NOTE)
