"""Law 6: every weight learns. Finds losses that are infinite or NaN."""

from math import isfinite, isnan

from ..law import WRONG, Breach, check
from .alive import LAW
from .ranks import Measured
from .states import State


@check(LAW, WRONG)
def loss_is_not_finite(job):
    """A loss becomes infinite or NaN, or weights do.

    Check this step for an empty batch, a wrong label, a logarithm of 0 or a division
    by 0. If the loss grew in the preceding steps, lower the learning rate.
    """
    series, found = {}, []
    for one in job.of(Measured):
        for name in one.values:
            if name.startswith("loss of "):
                series.setdefault((one.rank, name), []).append(one)
    kept = [x for x in job.of(State) if x.what == "weights"]
    own = [x for x in kept if x.step == 0], [x for x in kept if x.moment == "end"]
    lost = [any(isnan(y) for x in rows for y in x.values) for rows in own]
    spoilt = lost == [False, True]
    for (rank, name), rows in series.items():
        bad = [one for one in rows if not isfinite(one.values[name])]
        if bad and (spoilt or (len(bad) > 2 and bad == rows[-len(bad) :])):
            found.append((bad[0].step, name, rank, bad[0].values[name]))
    if found:
        step, name, rank, value = min(found)
        what = f"the loss is {value} in step {step + 1} on rank {rank}, and "
        what += "weights are nan at the end" if spoilt else "in all later steps"
        yield Breach(what, name.removeprefix("loss of "))
    elif spoilt:
        yield Breach("weights are nan at the end of the job")
