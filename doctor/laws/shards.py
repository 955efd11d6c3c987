"""Law 8: files are complete, and have one writer. Finds one rank's shards in files."""

import os

from ..event import Event
from ..law import WRONG, Breach, check, several
from ..loaders import leaves
from ..moments import Moments
from ..record import place, recorder, torch, wrap
from ..sample import numbers
from ..watcher import Watcher
from .alive import local
from .checkpoints import bare, dictionaries, no_optimizer, parts
from .files import LAW, base


class Cut(Event, limit=200):
    """torch.save() has written this process's shards of the weights."""

    path: str
    names: list[str]
    place: str


class Shards(Watcher):
    """Searches saved objects for shards."""

    def hooks(self) -> None:
        wrap(torch, "save", self.save)

    def save(self, call, obj, f, *args, **kwargs):
        result = call(obj, f, *args, **kwargs)
        path = getattr(f, "name", f)
        if isinstance(path, (str, os.PathLike)) and (names := cut(obj)):
            recorder.write(Cut(path=str(path), names=names[:9], place=place()))
        return result


def cut(obj) -> list[str]:
    """Return the names of weights whose shards (of this process) an object contains.

    The object's tensors match the shards by name and shape, or by shape and values.
    """
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
    saved = [local(one) for one in leaves(obj)]
    rows = zip([x.shape for x in saved], numbers(saved), strict=True)
    there = {(shape, *row) for shape, row in rows if len({*row}) > 3}
    own = zip(known.items(), numbers([local(x) for x in known.values()]), strict=True)
    alike = [n for (n, x), row in own if (local(x).shape, *row) in there]
    return named or alike


# --- checks ---


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
