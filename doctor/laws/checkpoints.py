"""Law 8: files are complete, and have one writer. Checks what checkpoints contain."""

import contextlib
import linecache
import os
import sys
import threading
from collections.abc import Iterable

from ..event import Event, Exit
from ..law import NOTE, RISK, WRONG, Breach, Doubt, check, need, several
from ..loaders import leaves
from ..moments import Moments
from ..record import place, recorder, torch, wrap
from ..sample import digest, numbers
from ..watcher import Watcher
from .files import LAW, PREFIXES, Opened, Restored, base, wrapped
from .meeting import hangs
from .states import kept


class Saved(Event, limit=200):
    """torch.save() has written a file that contains weights."""

    path: str | None
    whole: int  # number of the job's weights in the file, matched by name
    missing: list[str]  # weights and buffers that the file lacks
    wrapped: bool  # the weights have DDP's or torch.compile's names
    holds: list[str]  # the optimizers' states in the file
    has: list[str]  # the job's optimizers' states
    counts: bool  # the file contains a number of epochs or steps
    overwrites: bool  # the file existed, and this process had written it
    others: int  # number of this process's older files with weights that still exist
    place: str
    names: list[str] = ()  # trained weights whose values are in the file
    loads: bool = True  # the code beside the line that saves calls load_state_dict()


class Cut(Event, limit=200):
    """torch.save() has written this process's shards of the weights."""

    path: str
    names: list[str]
    place: str


class Checkpoints(Watcher):
    """Records the contents of files that the script saves or loads."""

    def __init__(self):
        self.weights = set()  # paths of files with weights
        self.marks = {}  # path of a file that torch.save() wrote -> hash
        self.states = set()  # the optimizers' states
        self.keys = set()  # names of tensors in optimizers' states, such as exp_avg
        self.given = None  # what torch.distributed.checkpoint is about to save

    def hooks(self) -> None:
        sys.addaudithook(self.audit)
        wrap(torch, "save", self.save)

    def checkpoint_hooks(self, dcp) -> None:
        for owner in (dcp, dcp.state_dict_saver):
            for name in ("save", "async_save"):
                wrap(owner, name, self.save_parts)
        wrap(dcp.state_dict_saver, "_stateful_to_state_dict", self.collect)

    def audit(self, name: str, args: tuple) -> None:
        """Track files that the script copies or renames."""
        if name in ("shutil.copyfile", "os.rename"):
            with contextlib.suppress(Exception):
                source, target = (os.path.abspath(os.fsdecode(x)) for x in args[:2])
                if source in self.weights:
                    self.weights.add(target)
                if name == "os.rename" and (mark := self.marks.pop(source, 0)):
                    one = Opened(path=target, saved=True, mark=mark, place=place())
                    recorder.write(one)

    def after_step(self, optimizer, weights) -> None:
        if "optimizer" not in self.states:
            kept = [*optimizer.state.values()]
            pairs = [pair for one in kept[:9] for pair in one.items()]
            if keys := {name for name, one in pairs if torch.is_tensor(one)}:
                self.states.add("optimizer")
                self.keys |= keys - {"step"}

    def save(self, call, obj, f, *args, **kwargs):
        named, path = isinstance(f, (str, os.PathLike)), path_of(f)
        there = named and path in self.weights and os.path.exists(path)
        others = sum(x != path and os.path.exists(x) for x in self.weights)
        content = self.content(obj)
        result = call(obj, f, *args, **kwargs)
        if path:
            recorder.write(Opened(path=path, saved=True, place=place()))
            self.marks[path] = mark_of(obj)
        if content:
            self.weights |= {path} - {None}
            recorder.write(Saved(**content, path=path, overwrites=there, others=others))
        if path and (names := cut(obj)):
            recorder.write(Cut(path=path, names=names[:9], place=place()))
        return result

    def collect(self, call, *args, **kwargs):
        self.given = call(*args, **kwargs)
        return self.given

    def save_parts(self, call, state, *args, **kwargs):
        """Record what the script saves with torch.distributed.checkpoint."""
        self.given, path = None, kwargs.get("checkpoint_id")
        result = call(state, *args, **kwargs)
        if threading.current_thread() is not threading.main_thread():
            return result  # async_save() calls save()
        state, self.given = state if self.given is None else self.given, None
        while len(state) == 1 and isinstance([*state.values()][0], dict):
            state = [*state.values()][0]
        if content := self.content(state):
            # torch.distributed.checkpoint copies tensors; all ranks write their parts
            content |= {"wrapped": False, "loads": True, "place": place()}
            content |= {"path": path and os.path.abspath(path)}
            recorder.write(Saved(**content, overwrites=False, others=1))
        return result

    def content(self, obj) -> dict:
        """Return what a saved object contains, or {} if it contains no weights."""
        found, known = [*dictionaries(obj)], {}
        if not (states := [one for one in found if is_state(one)]):
            return {}
        pairs = {bare(name): x for own in states for name, x in own.items()}
        missing = []
        for network in [*Moments.here.networks]:
            weights = {bare(name): one for name, one in network.named_parameters()}
            known |= weights
            needed = [name for name, one in weights.items() if one.requires_grad]
            if 2 * sum(name in pairs for name in needed) > len(needed):
                needed += [bare(name) for name, *_ in kept(network)]
                missing = [name for name in needed if name not in pairs]
        tensors = [x for one in states for x in floats(one) if not parts(x)]
        top = obj.values() if isinstance(obj, dict) else obj
        integers = [x for x in top if torch.is_tensor(x) and not x.is_floating_point()]
        held = has(obj, "param_groups") or any(self.keys & x.keys() for x in found)
        live = [x for _, y in [*Moments.here.known.values()] if (x := y()) is not None]
        code = linecache.getlines((where := place()).rpartition(":")[0])
        return {
            "whole": len(pairs.keys() & known.keys()),
            "names": within({Moments.here.name(x): x for x in live}, tensors),
            "missing": missing[:9],
            "wrapped": any(map(wrapped, states)),
            "holds": ["optimizer"] * held,
            "has": sorted(self.states),
            "counts": any(isinstance(one, int) for one in top)
            or (not is_state(obj) and any(x.numel() == 1 for x in integers)),
            "loads": any("load_state_dict" in line for line in code),
            "place": where,
        }


def cut(obj) -> list[str]:
    """Return the names of weights whose shards (of this process) an object contains."""
    known = {
        bare(name): one
        for network in [*Moments.here.networks]
        for name, one in network.named_parameters()
        if parts(one) and local(one).shape != one.shape
    }
    if not known:
        return []
    pairs = [pair for one in dictionaries(obj) for pair in one.items()]
    found = {bare(name): x for name, x in pairs if bare(name) in known}
    shapes = {name: getattr(local(x), "shape", None) for name, x in found.items()}
    named = [name for name in found if shapes[name] == local(known[name]).shape]
    return named or within(known, leaves(obj))


def within(weights: dict, tensors: Iterable) -> list[str]:
    """Return the names of weights whose (shards') values are among the tensors."""
    saved, own = [*map(local, tensors)], {n: local(x) for n, x in weights.items()}
    rows = zip([x.shape for x in saved], numbers(saved), strict=True)
    there = {(shape, *row) for shape, row in rows if len({*row}) > 1}
    rows = zip(own.items(), numbers([*own.values()]), strict=True)
    return [name for (name, x), row in rows if (x.shape, *row) in there]


def path_of(file) -> str | None:
    """Return the path of a file, which may be an open one; None if it has no path."""
    path = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
    return os.path.abspath(path) if isinstance(path, (str, os.PathLike)) else None


def mark_of(state) -> int:
    """Return a hash of a sample of a state's tensors, or 0 if the state has none."""
    found = numbers([x for x in floats(leaves(state)) if not parts(x)][-99:], 4)
    return digest(found) if found else 0


def dictionaries(value, depth: int = 0):
    """Yield all dictionaries in nested dictionaries, lists and tuples."""
    if isinstance(value, dict):
        yield value
        value = [*value.values()]
    if isinstance(value, (list, tuple)) and depth < 5:
        for one in value:
            yield from dictionaries(one, depth + 1)


def has(value, mark: str) -> bool:
    """Return whether a key of nested dictionaries starts with `mark`."""
    return any(str(key).startswith(mark) for x in dictionaries(value) for key in x)


def floats(state) -> list:
    """Return the floating-point tensors of a dictionary or list."""
    values = state.values() if isinstance(state, dict) else state
    return [x for x in values if torch.is_tensor(x) and x.is_floating_point()]


def is_state(one: dict) -> bool:
    """Return whether a dictionary contains weights, like the result of state_dict()."""
    found = floats(one)
    return bool(found) and 2 * len(found) >= len(one)


def parts(tensor) -> bool:
    """Return whether a tensor is sharded across processes."""
    return hasattr(tensor, "placements")


def local(tensor):
    """Return this process's shard if a tensor is sharded, else the tensor itself."""
    return tensor.to_local() if parts(tensor) else tensor


def bare(name) -> str:
    """Return a weight's name without the prefixes of wrappers such as DDP."""
    while str(name).startswith(PREFIXES):
        name = name.partition(".")[2]
    return str(name)


def checkpoints(job) -> list[tuple[str, list[Saved]]]:
    """Return (path, its Saved events) pairs; raise NotJudged if there are none."""
    found = {}
    for one in job.of(Saved):
        found.setdefault(one.path or "", []).append(one)
    return sorted(need(found, "no checkpoint with weights was saved").items())


@check(LAW, RISK, general=True, read="pitfall 18")
def no_optimizer(job):
    """A checkpoint for resuming does not contain the optimizer's state.

    Also save the state_dict() of the optimizer, the scheduler and the scaler, and load
    them when you resume.
    Not a mistake if: you never resume from this file.
    """
    saved = checkpoints(job)
    last = [own[-1] for _, own in saved]
    complete = any(one.has and {*one.has} <= {*one.holds} for one in last)
    end, unsure = max((x.step for x in job.of(Exit)), default=10**9), []
    tests = any(x.what == "weights" and x.step >= end for x in job.of(Restored))
    for (path, _), one in zip(saved, last, strict=True):
        missing = [name for name in one.has if name not in one.holds]
        if missing and ((one.counts and one.whole) or one.holds) and not complete:
            what = f"{base(path)} lacks the state of the {' and the '.join(missing)}"
            if not one.holds and (tests or not one.loads):
                unsure.append(f"{what}, but perhaps no run resumes from it")
            else:
                yield Breach(what, one.place)
        elif one.whole:
            more = f" and the state of the {' and the '.join(one.holds)}"
            yield f"{base(path)} has {one.whole} whole weights{more * bool(one.holds)}"
    if unsure:
        raise Doubt(unsure[0])


@check(LAW, RISK, effects=[no_optimizer], read="pitfall 18")
def lacking(job):
    """A checkpoint contains only some of the network's weights and buffers.

    Save model.state_dict(): it also contains buffers such as batch norm's statistics.
    Not a mistake if: the script restores the missing tensors in another way.
    """
    for path, own in checkpoints(job):
        now = [x for x in job.of(Saved) if x.step == own[-1].step]
        there = {name for one in now if one.rank != own[-1].rank for name in one.names}
        missing = [x for x in own[-1].missing if x not in there]
        if missing and (own[-1].counts or own[-1].holds):
            names = ", ".join(missing[:3])
            what = f"{base(path)} has {own[-1].whole} weights, but it lacks {names}"
            yield Breach(what, own[-1].place)


@check(LAW, NOTE, causes=[hangs], read="pitfall 20")
def save_in_place(job):
    """A new checkpoint overwrites the only old one in place.

    Write to a temporary file, then move it into place with os.replace().
    """
    for path, saves in checkpoints(job):
        own = [one for one in saves if one.overwrites]
        if own and not own[-1].others:
            what = f"the old {base(path)} is lost if the job is killed in torch.save()"
            yield Breach(what, own[-1].place)


@check(LAW, WRONG, effects=[no_optimizer], read="lesson 16")
def shards_saved(job):
    """A file contains only one rank's shards of the weights.

    Use get_state_dict() with full_state_dict=True, or torch.distributed.checkpoint.
    """
    several(job)
    found = job.of(Cut)
    if found and len({one.rank for one in found}) < len(job.processes):
        one = found[0]
        what = f"{base(one.path)} has only rank {one.rank}'s shards of the weights: "
        yield Breach(what + ", ".join(one.names[:3]), one.place)
