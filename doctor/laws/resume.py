"""Law 8: files are complete, and have one writer. Checks what a resume restores."""

from functools import partial

from ..event import Event
from ..generators import one_state
from ..law import NOTE, RISK, WRONG, Breach, Doubt, check, need
from ..moments import Step
from ..neighbours import Input
from ..record import place, recorder, torch, wrap
from ..watcher import Watcher
from .checkpoints import Saved, has, path_of
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
        state = args[0] if args else kwargs["state_dict"]
        facts = {"wrapped": wrapped(state), "place": place()}
        event = Restored(what=what, lost=False, **facts)
        result = call(owner, *args, **kwargs)
        unknown = getattr(result, "unexpected_keys", ())
        event.lost = bool(unknown) and len(unknown) >= len(state)
        recorder.write(event)
        return result


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
