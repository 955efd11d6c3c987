"""Law 8: one process writes each file, and a checkpoint holds what a resume needs."""

import contextlib
import os
import sys
from dataclasses import dataclass
from typing import ClassVar

from ..event import Event, Start
from ..law import NOTE, RISK, WRONG, Breach, Law, NotJudged, check, explains, several
from ..record import LIBRARY, OWN, not_the_users, place, recorder, wrap
from ..watcher import Watcher
from .meeting import ends_with_an_error, hangs

LAW = Law(8, "files", "One process writes each file")
WRITES = os.O_WRONLY | os.O_RDWR
SYSTEM = "/dev/", "/proc/", "/sys/"
THROUGH = "logging", "pathlib", "shutil", "gzip", "bz2", "lzma", "zipfile"
CACHES = "cache", ".lock", "__pycache__"
PREFIXES = "module.", "_orig_mod."  # of wrapped networks' names


@dataclass(kw_only=True)
class Opened(Event):
    """A file has been opened to write into it."""

    limit: ClassVar[int] = 300
    path: str
    place: str


@dataclass(kw_only=True)
class Saved(Event):
    """torch.save() has written a file."""

    limit: ClassVar[int] = 200
    path: str | None
    weights: bool
    wrapped: bool  # the weights have DDP's or torch.compile's names
    holds: list[str]  # other states: optimizer, schedule, scaler
    has: list[str]  # those of the job
    counts: bool  # a number of epochs or steps
    shards: bool
    overwrites: bool  # the file was there, and this process had written it
    others: int  # older files with weights of this process that are still there
    place: str


class Files(Watcher):
    """Records which files a process writes."""

    def __init__(self):
        self.weights = set()  # paths of files with weights
        self.states = set()  # what the job has
        self.optimizer = None
        self.saving = False

    def hooks(self) -> None:
        import torch

        sys.addaudithook(self.audit)  # also sees an open() that a class has kept
        wrap(torch, "save", self.save)
        wrap(torch.amp.GradScaler, "scale", self.scale)
        wrap(torch.optim.lr_scheduler.LRScheduler, "__init__", self.schedule)

    def audit(self, name: str, args: tuple) -> None:
        """Follow the process's files; Python calls this for every such event."""
        if name == "open" and isinstance(args[2], int) and args[2] & WRITES:
            with contextlib.suppress(Exception):
                self.opened(args[0])
        elif name in ("shutil.copyfile", "os.rename"):
            with contextlib.suppress(Exception):
                source, target = (os.path.abspath(os.fsdecode(x)) for x in args[:2])
                if source in self.weights:
                    self.weights.add(target)

    def opened(self, file) -> None:
        if not isinstance(file, (str, os.PathLike)) or recorder.full(Opened):
            return
        path, frame = os.path.abspath(os.fsdecode(file)), sys._getframe(2)
        code, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
        if code.startswith(OWN) or path.startswith(SYSTEM):
            return
        installed = "-packages" in code and not code.startswith(not_the_users())
        standard = code.startswith((*not_the_users(), LIBRARY)) and not installed
        if standard and not module.startswith(THROUGH):
            return  # such as code that PyTorch has compiled
        inside = os.path.relpath(path)
        known = inside.startswith("..") or any(one in inside for one in CACHES)
        if installed and known:
            return
        recorder.write(Opened(path=path, place=place(frame)))

    def schedule(self, call, scheduler, *args, **kwargs):
        call(scheduler, *args, **kwargs)
        self.states.add("schedule")

    def scale(self, call, scaler, *args, **kwargs):
        if scaler.is_enabled():
            self.states.add("scaler")
        return call(scaler, *args, **kwargs)

    def after_step(self, optimizer, weights) -> None:
        import torch

        if "optimizer" not in self.states:
            kept = [*optimizer.state.values()]
            values = [value for one in kept[:9] for value in one.values()]
            if any(torch.is_tensor(one) for one in values):
                self.states.add("optimizer")

    def save(self, call, obj, f, *args, **kwargs):
        named = isinstance(f, (str, os.PathLike))
        path = f if named else getattr(f, "name", None)
        path = os.path.abspath(path) if isinstance(path, (str, os.PathLike)) else None
        there = named and path in self.weights and os.path.exists(path)
        others = [x for x in self.weights if x != path and os.path.exists(x)]
        result = call(obj, f, *args, **kwargs)
        content = self.content(obj)
        if path and content["weights"]:
            self.weights.add(path)
        saved = Saved(
            path=path,
            overwrites=there,
            others=len(others),
            place=place(),
            has=sorted(self.states),
            **content,
        )
        recorder.write(saved)
        return result

    def content(self, obj) -> dict:
        """Return what an object that is saved contains."""
        import torch

        found = [*dictionaries(obj)]
        states = [[*map(str, one)] for one in found if is_state(one)]
        wrapped = [all(x.startswith(PREFIXES) for x in own) for own in states]
        marks = {"optimizer": "param_groups", "scaler": "growth_factor"}
        marks["schedule"] = "last_epoch"
        top = obj.values() if isinstance(obj, dict) else obj
        top = top if isinstance(obj, (dict, list, tuple)) else ()
        values = [value for one in found for value in one.values()]
        values = [one for one in values if isinstance(one, torch.Tensor)]
        parts = [x for one in values for x in getattr(one, "placements", ())]
        holds = [k for k, mark in marks.items() if any(mark in one for one in found)]
        return {
            "weights": bool(states),
            "wrapped": any(wrapped),
            "holds": sorted(holds),
            "counts": any(isinstance(one, int) for one in top),
            "shards": any(one.is_shard() for one in parts),
        }


def is_state(one: dict) -> bool:
    """Return whether a dictionary holds weights, such as one from state_dict()."""
    import torch

    floats = [v for v in one.values() if torch.is_tensor(v) and v.is_floating_point()]
    return bool(floats) and 2 * len(floats) >= len(one)


def dictionaries(value, depth: int = 0):
    """Yield all dictionaries in nested dictionaries, lists and tuples."""
    if isinstance(value, dict):
        yield value
        value = [*value.values()]
    if isinstance(value, (list, tuple)) and depth < 5:
        for one in value:
            yield from dictionaries(one, depth + 1)


def written(job) -> dict[tuple[str, str], list[Event]]:
    """Return the events of each file, by host and path."""
    files = {}
    for process in job.processes:
        host = process.of(Start)[0].host
        for one in process.of(Saved) + process.of(Opened):
            if one.path:
                files.setdefault((host, one.path), []).append(one)
    return files


def saves(job) -> list[Saved]:
    """Return the saves of weights; raise NotJudged if there are none."""
    found = [one for one in job.of(Saved) if one.weights]
    if not found:
        raise NotJudged("torch.save() got no weights")
    return found


def base(path: str | None) -> str:
    """Return a file's name, as a finding shows it."""
    return os.path.basename(path or "a file")


@check(LAW, RISK, general=True, read="docs/pitfalls.md, number 20")
def several_write(job):
    """Several ranks write the same file.

    Write files on rank 0 only, or give each rank its own file.
    Not a mistake if: all ranks write the same content, or append whole lines.
    """
    several(job)
    files, own = written(job), set()
    if not files:
        raise NotJudged("no file was written")
    shared, saved = [], False
    for (_, path), events in sorted(files.items()):
        ranks = {one.rank for one in events}
        own |= ranks
        if len({one.rank for one in events if isinstance(one, Saved)}) > 1:
            what = (
                f"{base(path)} is saved by ranks {', '.join(map(str, sorted(ranks)))}"
            )
            saved = True
            yield Breach(what, events[0].place, facts=events)
        elif len(ranks) > 1:
            shared.append((base(path), events))
    if shared:
        names = ", ".join(name for name, _ in shared[:3])
        names += f" and {len(shared) - 3} more" * (len(shared) > 3)
        ranks = sorted({one.rank for _, events in shared for one in events})
        does = "are" if len(shared) > 1 else "is"
        what = f"{names} {does} written by ranks {', '.join(map(str, ranks))}"
        yield Breach(what, shared[0][1][0].place, facts=[])
    if shared or saved:
        return
    count = f"{len(files)} file{'s' * (len(files) > 1)}"
    who = f"rank {min(own)}" if len(own) == 1 else "one rank each"
    yield f"{count} written by {who}"


@explains(several_write, WRONG)
def several_save(job, breach):
    """Several ranks save the same file, and overwrite each other's data.

    Save on rank 0 only.
    """
    if breach.facts:
        return Breach(f"{breach.what}, which overwrite each other's data", breach.place)
    return None


@check(LAW, WRONG, read="tutorial/16_sharded")
def shards_saved(job):
    """A file from one rank has only that rank's shards of the tensors.

    Use get_state_dict() with full_state_dict=True, or torch.distributed.checkpoint.
    """
    several(job)
    found = [one for one in job.of(Saved) if one.shards and one.path]
    if found and len({one.rank for one in found}) < len(job.processes):
        one = found[0]
        what = f"{base(one.path)} has rank {one.rank}'s shards of the weights"
        yield Breach(what, one.place)


@check(LAW, RISK, causes=[hangs], read="docs/pitfalls.md, number 20")
def save_in_place(job):
    """A new checkpoint overwrites the only old one in place.

    Write to a temporary file, then os.replace() the old checkpoint with it.
    Not a mistake if: you also keep an older checkpoint.
    """
    for path in sorted({one.path for one in saves(job) if one.overwrites}):
        own = [one for one in saves(job) if one.path == path and one.overwrites]
        if not own[-1].others:
            what = f"{base(path)} is overwritten in place {len(own)} time"
            what += f"{'s' * (len(own) > 1)}: if the job is killed meanwhile, "
            yield Breach(f"{what}both checkpoints are lost", own[-1].place)


@check(LAW, RISK, read="docs/pitfalls.md, number 18")
def ddp_keys(job):
    """Saved weights have names that only the wrapped network has.

    Save model.module.state_dict().
    Not a mistake if: you load them only into a DDP model.
    """
    for path in sorted({one.path or "" for one in saves(job) if one.wrapped}):
        own = [one for one in saves(job) if (one.path or "") == path]
        what = f"the weights in {base(path)} are named module.* or _orig_mod.*"
        yield Breach(what, own[0].place)


@check(LAW, RISK, general=True, read="docs/pitfalls.md, number 18")
def no_optimizer(job):
    """A checkpoint for resuming does not contain the optimizer's state.

    Also save optimizer.state_dict(), and load it.
    Not a mistake if: you never resume from it.
    """
    lacking = {}
    for one in saves(job):
        missing = [name for name in one.has if name not in one.holds]
        if not one.counts and not one.holds:
            continue  # weights only: not for resuming
        lacking[one.path] = one, missing
    for path, (one, missing) in lacking.items():
        if "optimizer" in missing:
            what = f"{base(path)} has weights and a number of epochs or steps, but no "
            yield Breach(f"{what}optimizer state", one.place)
        elif not missing:
            held = ", ".join(("weights", *one.holds))
            yield f"{base(path)} has {held}"


@check(LAW, NOTE, causes=[ends_with_an_error], read="docs/pitfalls.md, number 18")
def incomplete_checkpoint(job):
    """A checkpoint for resuming lacks the state of the schedule or of the scaler.

    Also save the scheduler's and the scaler's state_dict(), and load them.
    """
    for path in sorted({one.path or "" for one in saves(job)}):
        one = [x for x in saves(job) if (x.path or "") == path][-1]
        missing = [x for x in one.has if x not in one.holds and x != "optimizer"]
        if "optimizer" in one.holds and missing:
            what = f"{base(path)} has the optimizer's state, but not that of the "
            yield Breach(f"{what}{' and the '.join(missing)}", one.place)
