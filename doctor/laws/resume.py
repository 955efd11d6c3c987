"""Law 8: files are complete, and have one writer. Checks what a resume restores."""

import sys
from functools import partial
from traceback import walk_stack

from ..event import Event
from ..generators import one_state
from ..law import NOTE, RISK, WRONG, Breach, Doubt, check, need
from ..moments import Step
from ..neighbours import Input
from ..record import place, recorder, torch, wrap
from ..watcher import Watcher
from .checkpoints import Checkpoints, Saved, floats, has, no_optimizer, parts, path_of
from .files import LAW, Restored, base, wrapped


class Loaded(Event, limit=50):
    """torch.load() has returned an optimizer's state."""

    path: str | None
    schedule: bool  # also a scheduler's state
    place: str


class Resumes(Watcher):
    """Tracks calls of torch.load() and load_state_dict()."""

    def hooks(self) -> None:
        wrap(torch, "load", self.load)
        scheduler = torch.optim.lr_scheduler.LRScheduler
        owners = {torch.optim.Optimizer: "optimizer", torch.nn.Module: "weights"}
        owners |= dict.fromkeys((scheduler, *scheduler.__subclasses__()), "schedule")
        for owner, what in owners.items():
            if "load_state_dict" in vars(owner):
                wrap(owner, "load_state_dict", partial(self.restore, what))

    def load(self, call, *args, **kwargs):
        result = call(*args, **kwargs)
        path = path_of(args[0] if args else kwargs["f"])
        if has(result, "param_groups"):
            schedule = has(result, "last_epoch")
            recorder.write(Loaded(path=path, schedule=schedule, place=place()))
        return result

    def restore(self, what: str, call, owner, *args, **kwargs):
        known, state = Checkpoints.here, args[0] if args else kwargs["state_dict"]
        pairs = [*owner.named_parameters()] if what == "weights" else ()
        own = {one.data_ptr() for _, one in pairs if not parts(one)}
        given = [(one, (known.taken or {}).get(one)) for one in floats(state)]
        # torch.distributed.checkpoint loads into the network's own tensors
        same = [
            one.data_ptr() in own and one._version != mark[1]
            for one, mark in given
            if mark and (mark[0], mark[3]) != (recorder.step, known.loads)
        ]
        known.loads += what == "weights"
        files = [x.f_code.co_filename for x, _ in walk_stack(sys._getframe())]
        loads = any("torch/distributed/checkpoint" in one for one in files)
        own = any(same) and not loads
        given = {"own": own, "wrapped": wrapped(state), "place": place()}
        event = Restored(what=what, lost=False, **given)
        result = call(owner, *args, **kwargs)
        unknown = getattr(result, "unexpected_keys", ())
        event.lost = bool(unknown) and len(unknown) >= len(state)
        recorder.write(event)
        return result


@check(LAW, RISK, effects=[no_optimizer])
def live_snapshot(job):
    """A "copy" of the weights is not a copy: the optimizer still changes it.

    Copy what state_dict() returns: copy.deepcopy(model.state_dict()).
    Not a mistake if: you want the weights as they are when the file is written.
    """
    for one in job.of(Restored):
        if one.own:
            what = "load_state_dict() gets the network's own tensors: nothing changes"
            yield Breach(what, one.place, level=WRONG)
            return
    for one in job.of(Saved):
        if one.taken is not None:
            what = f"{base(one.path)} is saved after step {one.step} with state_dict() "
            what += f"of step {one.taken}, whose tensors have changed since"
            level = RISK if one.taken else NOTE  # perhaps all of the job's weights
            yield Breach(what, one.place, level=level)
            return


@check(LAW, RISK, read="pitfall 18")
def ddp_keys(job):
    """Saved weights have names that only the wrapped network has.

    Save model.module.state_dict().
    Not a mistake if: you load this file only into a DDP model.
    """
    if any(one.wrapped and not one.lost for one in job.of(Restored)):
        return  # the script loads such names
    for path, one in {x.path: x for x in job.of(Saved) if x.wrapped}.items():
        what = f"weights in {base(path or '')} are named module.* or _orig_mod.*"
        level = NOTE if one.holds else RISK  # a file to resume from
        yield Breach(what, one.place, level=level)


@check(LAW, RISK, read="pitfall 18")
def not_restored(job):
    """A resumed run does not restore the optimizer or the scheduler.

    On every rank, load the optimizer's state (or the rank's part) and the scheduler's.
    Not a mistake if: you only want the weights.
    """
    restored, resumes = job.of(Restored), False
    for process in job.processes:
        own = [one for one in process.of(Restored) if one.what == "weights"]
        if own and own[-1].lost:
            what = "the file has none of the names for which load_state_dict() looks"
            mend = "Save model.module.state_dict(), and load it with strict=True."
            yield Breach(what, own[-1].place, level=WRONG, mend=mend)
            return
    loads, done = job.of(Loaded), {one.what for one in restored}
    ranks = sorted({one.rank for one in restored if one.what == "optimizer"})
    if loads and 0 < len(ranks) < len(job.processes) and not job.interrupted:
        told = " and ".join(map(str, ranks))
        what = f"of {job.world_size} ranks, only {told} restore the optimizer's state"
        yield Breach(what, loads[0].place, level=WRONG)
        return
    for one in need(loads, "no checkpoint with an optimizer is loaded"):
        lost = ["optimizer"] * ("optimizer" not in done)
        lost += ["schedule"] * (one.schedule and "schedule" not in done)
        steps = [x.time for x in job.of(Step) if x.rank == one.rank]
        # Otherwise, the file was only read, for example to count its tensors
        used = any(x.what == "weights" and x.time > one.time for x in restored)
        later = max(steps, default=0) > one.time
        if lost and used and later:
            what = f"nothing loads the {' and the '.join(lost)}'s state from the file"
            yield Breach(what, one.place)
            return
        resumes |= used and later
    inputs = [x for one in job.processes[0].of(Input) for x in one.rows]
    again = len({*inputs}) < len(inputs) and job.processes[0].training is None
    if one := one_state(job):
        raise Doubt(f"{one.call} sets one generator's state on all ranks")
    if resumes and again:
        raise Doubt("without a DataLoader, the samples after a resume are unknown")
