"""Law 8: one process writes each file. Checks what a resumed run restores."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ..event import Event
from ..law import NOTE, RISK, WRONG, Breach, check, need
from ..moments import Step
from ..record import place, recorder, wrap
from ..watcher import Watcher
from .checkpoints import (
    Checkpoints,
    Saved,
    dictionaries,
    floats,
    has,
    no_optimizer,
    parts,
)
from .files import LAW, base


@dataclass(kw_only=True)
class Loaded(Event):
    """torch.load() has returned a state of an optimizer."""

    limit: ClassVar[int] = 50
    schedule: bool  # also a scheduler's state
    place: str


@dataclass(kw_only=True)
class Restored(Event):
    """The script has called load_state_dict()."""

    limit: ClassVar[int] = 200
    what: str  # weights, optimizer or schedule
    lost: bool  # no name in the file matches
    own: bool  # its argument contained the network's own current tensors
    place: str


class Resumes(Watcher):
    """Follows torch.load() and load_state_dict()."""

    def hooks(self) -> None:
        import torch
        from torch.optim.lr_scheduler import LRScheduler

        wrap(torch, "load", self.load)
        optimizer, network = torch.optim.Optimizer, torch.nn.Module
        for owner, what in ((optimizer, "optimizer"), (network, "weights")):
            wrap(owner, "load_state_dict", partial(self.restore, what))
        for owner in (LRScheduler, *LRScheduler.__subclasses__()):
            if "load_state_dict" in vars(owner):
                wrap(owner, "load_state_dict", partial(self.restore, "schedule"))

    def load(self, call, *args, **kwargs):
        result = call(*args, **kwargs)
        found = [*dictionaries(result)]
        if has(found, "param_groups"):
            schedule = has(found, "last_epoch")
            recorder.write(Loaded(schedule=schedule, place=place()))
        return result

    def restore(self, what: str, call, owner, *args, **kwargs):
        known, state = Checkpoints.here, args[0] if args else kwargs["state_dict"]
        weights = owner.parameters() if what == "weights" else ()
        own = {one.data_ptr() for one in weights if not parts(one)}
        given = [(one, (known.taken or {}).get(one)) for one in floats(state)]
        # torch.distributed.checkpoint loads into the network's own tensors
        same = [
            one.data_ptr() in own and one._version != mark[1]
            for one, mark in given
            if mark and (mark[0], mark[3]) != (recorder.step, known.loads)
        ]
        known.loads += what == "weights"
        result = call(owner, *args, **kwargs)
        unknown = getattr(result, "unexpected_keys", ())
        lost = bool(unknown) and len(unknown) >= len(state)
        recorder.write(Restored(what=what, lost=lost, own=any(same), place=place()))
        return result


# --- checks ---


@check(LAW, RISK, effects=[no_optimizer])
def live_snapshot(job):
    """A "copy" of the weights is not a copy: the optimizer still changes it.

    Copy what state_dict() returns: copy.deepcopy(model.state_dict()).
    Not a mistake if: you want the weights as they are when the file is written.
    """
    for one in job.of(Restored):
        if one.own:
            what = "load_state_dict() gets the network's own tensors, and restores "
            yield Breach(f"{what}nothing", one.place, level=WRONG)
            return
    for one in job.of(Saved):
        if one.taken is not None:
            what = f"{base(one.path)} is saved after step {one.step} with what "
            what += f"state_dict() returned after step {one.taken}; the weights have "
            level = RISK if one.taken else NOTE  # perhaps all of the job's weights
            what += "changed since, and so has this copy"
            yield Breach(what, one.place, level=level)
            return


@check(LAW, RISK, read="pitfall 18")
def not_restored(job):
    """A resumed run does not restore the optimizer or the scheduler.

    Call load_state_dict() of the optimizer and of the scheduler, on every rank.
    Not a mistake if: you only want the weights.
    """
    restored = job.of(Restored)
    for process in job.processes:
        own = [one for one in process.of(Restored) if one.what == "weights"]
        if own and own[-1].lost:
            what = f"rank {process.rank}'s load_state_dict() finds none of the "
            what += "network's names in the file, and loads no weight"
            mend = "Load what model.module.state_dict() saved, with strict=True."
            yield Breach(what, own[-1].place, level=WRONG, mend=mend)
            return
    loads = need(job.of(Loaded), "no checkpoint with an optimizer is loaded")
    done = {one.what for one in restored}
    ranks = sorted({one.rank for one in restored if one.what == "optimizer"})
    if 0 < len(ranks) < len(job.processes) and not job.interrupted:
        told = " and ".join(map(str, ranks))
        what = f"of {job.world_size} ranks, only {told} restore the optimizer's state"
        yield Breach(what, loads[0].place, level=WRONG)
        return
    for one in loads:
        lost = ["optimizer"] * ("optimizer" not in done)
        lost += ["schedule"] * (one.schedule and "schedule" not in done)
        steps = [x.time for x in job.of(Step) if x.rank == one.rank]
        if lost and any(time > one.time for time in steps):
            what = f"the checkpoint has the {' and the '.join(lost)}'s state, but "
            yield Breach(f"{what}nothing loads it", one.place)
            return
