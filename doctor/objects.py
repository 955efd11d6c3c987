"""Read tensors in the script's own objects, and strings in its functions' variables."""

import gc
import inspect
import linecache
import re
import sys
import weakref
from array import array
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, count, islice
from traceback import walk_stack
from types import CodeType, FrameType

from .record import LIBRARY, not_the_users, torch
from .sample import picked

MOST, LARGE = 64, 65_536  # limits: tensors to read; size of a tensor to sum
BLOCKS = 4_000_000  # blocks of Python's memory: with more, a search takes too long
JOINS = re.compile(r"\bcat\(|concat|chain|sum\(|\bfor .*\bfor ")
TURNS = re.compile("stack|transpose|zip|sort|permute|rearrange|swapaxes|mean")
CUTS = re.compile(r"\[ ?: ?[a-z]")  # as in rows[: len(dataset)]
COPY = "copy "  # begins the names of the weights of networks without an optimizer
LAYER = "layer "  # begins the names of tensors that a trained network's layer uses
FRAMES, LONGEST = 3, 60  # limits: functions to search; characters in a string


class Objects:
    """Networks, the script's variables, and the objects of its own classes."""

    def __init__(self):
        self.found = None  # names and weak references of objects
        self.networks = []  # the same for all outermost networks

    def search(self) -> None:
        """Search all Python objects for the script's own; this can take a second."""
        every = gc.get_objects() if sys.getallocatedblocks() < BLOCKS else []
        kinds = {kind for kind in {*map(type, every)} if is_users(kind)}
        own = [one for one in every if type(one) in kinds]
        self.found = [(type(one).__name__, weakref.ref(one)) for one in own]
        own = [one for one in every if issubclass(type(one), torch.nn.Module)]
        inner = {id(x) for one in own for x in one.children()}
        own = [one for one in own if id(one) not in inner]
        self.networks = [(type(one).__name__, weakref.ref(one)) for one in own]

    def renew(self) -> None:
        """Search again; of a class with new objects, keep the new ones only."""
        before = [*(self.found or ()), *self.networks]
        old = {id(one()): one() for _, one in before}
        self.search()
        for own in (self.found, self.networks):
            new = {kind for kind, one in own if id(one()) not in old}
            own[:] = [x for x in own if x[0] not in new or id(x[1]()) not in old]

    def tensors(self, weights: dict) -> dict:
        """Return {name: a few numbers} for tensors whose ids are not in `weights`.

        Of networks, these are the weights of those that no optimizer trains.
        """
        if self.found is None:
            self.search()
        (main, *others), owners = namespaces(sys._getframe()), []
        copies, layers, found = [], set(), {}
        for kind, reference in self.networks:
            own = dict(getattr(reference(), "named_parameters", dict)())
            if any(id(one) in weights for one in own.values()):
                layers |= {*map(id, reference().modules())}
            else:
                own = {name: one.detach() for name, one in own.items()}
                copies.append((f"{COPY}{kind}.", own))
        for kind, reference in self.found:
            if own := getattr(one := reference(), "__dict__", None):
                used = used_by(type(one), "forward") if id(one) in layers else ()
                for name, x in [*own.items()]:
                    owners.append((f"{LAYER * (name in used)}{kind}.", {name: x}))
        for prefix, own in [main, *owners, *copies, *others]:
            for name, one in [*own.items()]:
                parts = nested(one, "", 2 * bool(prefix and name[0] != "_"))
                for key, x in islice(parts, MOST // 4):
                    if id(x) not in weights and len(found) < MOST:
                        found[label_of(f"{prefix}{name}{key}", found)] = few_of(x)
        return found


def used_by(kind: type, *methods: str) -> set[str]:
    """Return the names in the code of a class's methods and of methods they call."""
    names = [*methods]
    for name in names:
        code = getattr(getattr(kind, name, None), "__code__", None)
        names += {*getattr(code, "co_names", ())} - {*names}
    return {*names}


def nested(value, key: str, depth: int, least: int = 8) -> Iterator[tuple]:
    """Yield (key, tensor) for float tensors or arrays of `least` elements or more."""
    if type(value) is torch.Tensor:
        size = 0 if value.requires_grad else value.numel()
        if value.is_floating_point() and size >= least:
            yield key, value
    elif type(value).__name__ == "ndarray":
        if value.dtype.str in ("<f4", "<f8") and least <= value.size <= LARGE:
            yield key, torch.from_numpy(value.copy())
    elif depth and isinstance(value, (dict, list, tuple)) and len(value) <= MOST:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for name, one in [*pairs]:
            if not isinstance(one, (int, float, str)):
                yield from nested(one, f"{key}[{name!r}]", depth - 1, least)


def is_users(kind: type) -> bool:
    """Return whether the script itself defines a class."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None) or ""
    library = file.startswith((*not_the_users(), LIBRARY)) or "-packages" in file
    return bool(file) and not library and kind.__weakrefoffset__ != 0


def label_of(name: str, found: dict) -> str:
    """Return a name, followed by a number if the name is already used."""
    labels = chain([name], (f"{name} #{number}" for number in count(2)))
    return next(one for one in labels if one not in found)


def few_of(tensor):
    """Return seven numbers of a tensor and, if it is small, its sum: (8,) float64."""
    few, small = picked(tensor, 7), tensor.numel() <= LARGE
    rest = tensor.detach().sum(dtype=few.dtype) if small else few[0]
    return torch.cat([few, rest[None]])


def scopes(frame: FrameType | None) -> Iterator[tuple[CodeType, dict]]:
    """Yield the code and variables of the script's function, and of its callers."""
    outside = (*not_the_users(), LIBRARY)
    frames = [one for one, _ in walk_stack(frame)]
    frames = [x for x in frames if not x.f_code.co_filename.startswith(outside)]
    for one in frames[:FRAMES]:
        code = one.f_code
        old = sys.version_info < (3, 13)  # f_locals is what locals() has returned
        named = old and {"locals", "vars", "dir"} & {*code.co_names}
        values = {} if named else one.f_locals
        yield code, values
        # Before Python 3.13, the frame would keep references to all values
        own = type(values) is dict and code.co_flags & inspect.CO_OPTIMIZED
        if own and sys.getrefcount(values) < 4:
            values.clear()


def namespaces(frame: FrameType | None) -> list[tuple[str, dict]]:
    """Return (prefix, variables) of the script's module and of its functions."""
    found = [("", vars(sys.modules["__main__"]))]
    for code, values in scopes(frame):
        if code.co_name != "<module>":
            found.append((f"{code.co_name}().", {**values}))
        del values
    return found


def variables(frame: FrameType | None, tensor, entries: bool = False) -> dict[str, str]:
    """Return the strings in variables of a frame's stack.

    A list of as many strings as the tensor has elements, in the innermost function, if
    this sorts nothing, is returned as lines. With `entries`, dictionaries' keys for the
    tensor are returned, too.
    """
    texts, size = {}, tensor.numel()
    for number, (code, values) in enumerate(scopes(frame)):
        sorts = "sorted" in code.co_names
        read = number == 0 and 1 < size <= MOST and not sorts
        for k, x in [*values.items()] if read else ():
            if type(x) in (list, tuple) and len(x) == size and {*map(type, x)} == {str}:
                texts[k] = "\n".join(one[:LONGEST] for one in x)
        for k, x in [*values.items()]:
            # Methods of other types may communicate
            if entries and type(x) in (dict, defaultdict) and len(x) <= MOST:
                own = [key for key, one in [*x.items()] if one is tensor]
                own = [key for key in own if type(key) in (str, int)]
                texts |= {f"keys of {k}": str(key)[:LONGEST] for key in own}
        few = {k: x for k, x in values.items() if type(x) is str and k[:2] != "__"}
        texts = {k: x for k, x in few.items() if len(x) <= LONGEST} | texts
        del values
    return texts


def indices(frame: FrameType | None, count: int) -> array | None:
    """Return the variable that seems to hold the indices of a batch's samples."""
    best, most = None, 0.7 * count
    for _, values in scopes(frame):
        for one in [*values.values()]:
            if type(one).__name__ in ("Tensor", "ndarray") and one.shape == (count,):
                one = one.tolist() if getattr(one, "is_cpu", True) else ()
            if type(one) in (list, tuple) and len(one) == count > 0:
                # Positions in the batch are smaller than `count`
                whole = all(type(x) is int for x in one) and max(one) >= count
                if whole and len({*one}) > most:
                    best, most = array("q", one), len({*one})
        del values
    return best


def kind(module) -> str:
    """Return "batch norm" or "dropout" if a module is such a layer, else ""."""
    layers = torch.nn.modules
    if isinstance(module, layers.batchnorm._BatchNorm):
        return "batch norm" if module.track_running_stats else ""
    drops = isinstance(module, layers.dropout._DropoutNd) and module.p > 0
    return "dropout" if drops else ""


def unwrapped(network):
    """Return the network inside DDP or DataParallel, or else the network itself."""
    parallel = torch.nn.parallel
    kinds = parallel.DistributedDataParallel, parallel.DataParallel
    return network.module if isinstance(network, kinds) else network


def trains(network) -> bool:
    """Return whether dropout or batch norm layers are in training mode."""
    return any(one.training and kind(one) for one in network.modules())


def of_a_loop(values: list[str]) -> bool:
    """Return whether values are all different, or repeat different ones in turn."""
    count = len({*values})
    return count > 1 and all(x == values[n % count] for n, x in enumerate(values))


def joins(where: str) -> bool:
    """Return whether code after a line joins all ranks' parts, and cuts the result."""
    path, _, line = where.rpartition(":")
    code = "".join(linecache.getlines(path)[int(line or 0) :][:4])
    code = code.partition("\ndef ")[0]
    return bool(JOINS.search(code) and CUTS.search(code)) and not TURNS.search(code)
