"""Distinguish datasets by their contents."""

import contextlib
import warnings
from collections import deque
from itertools import combinations
from numbers import Number
from pathlib import PurePath

from .job import Job, Process
from .loaders import inside
from .reads import feeds
from .record import torch
from .sample import digest, hashes, numbers, positions

FEW, ALL = 64, 5000  # limits: entries to hash in order; entries to sum
PLAIN = int, float, str, bytes, bool, complex, type(None)
READ = list.__getitem__, tuple.__getitem__, deque.__getitem__  # no code of the script


def signature(dataset) -> dict[str, tuple[int, int, int | None]]:
    """Return {attribute: three numbers} for the lists and arrays of a dataset.

    They are its length, a hash of a few entries in order, and one of all in any order.
    """
    found = {}
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for read-only arrays
        _search(inside(dataset)[0], "", 0, found)
    return found


def plain(dataset) -> dict[str, float]:
    """Return numbers (or the first ones of ranges) in a dataset and those inside it."""
    found = {}
    with contextlib.suppress(Exception):
        for _ in range(4):
            for name, one in [*vars(dataset).items()][:40]:
                one = one[0] if isinstance(one, (tuple, range)) and one else one
                if isinstance(one, Number):
                    one = one.item() if hasattr(one, "item") else one  # NumPy's
                    found[f"{type(dataset).__name__}.{name}"] = one
            dataset = dataset.dataset
    return found


def _search(value, name: str, depth: int, found: dict) -> None:
    if isinstance(value, (torch.nn.Module, *PLAIN)) or len(found) > 40:
        return
    if _is_array(value):
        if value.ndim and len(value) > 1:
            found[name] = _array(torch.as_tensor(value))
    elif type(value).__module__.startswith("datasets."):  # Hugging Face's
        if hasattr(value, "_indices"):  # value[i] would call the user's transform
            chosen = value._indices and value._indices.column(0).to_pylist()
            few = [chosen[i] if chosen else i for i in positions(len(value), 16)]
            found[name] = _entries([value._data.slice(i, 1).to_pylist() for i in few])
    elif isinstance(value, range):
        found[name] = len(value), digest([value.start, value.step]), None
    elif getattr(type(value), "__getitem__", None) in READ:
        inner = [one for one in value if hasattr(one, "__getitem__")][:16]
        if len(value) > 7 and any(_text(value[i]) for i in positions(len(value), 8)):
            found[name] = _entries(value)
        elif depth < 4 and len(value) < 17:
            for number, one in enumerate(inner):
                _search(one, f"{name}[{number}]", depth + 1, found)
    elif depth < 4:
        fields = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        for key, one in fields.items() if len(fields) < 100 else ():
            if isinstance(key, str):
                _search(one, f"{name}.{key}".lstrip("."), depth + 1, found)


def _is_array(value) -> bool:
    if isinstance(value, torch.Tensor):
        return value.layout == torch.strided and not value.is_complex()
    return type(value).__name__ == "ndarray" and value.dtype.kind in "biuf"


def _array(rows) -> tuple[int, int, int | None]:
    few = rows[list(positions(len(rows), FEW))]
    every = sum(hashes(rows, 16)) if len(rows) <= ALL else None
    return len(rows), digest(hashes(few)), every


def _entries(values) -> tuple[int, int, int | None]:
    few = [_text(values[i]) for i in positions(len(values), FEW)]
    every = sum(digest(_text(one)) for one in values) if len(values) <= ALL else None
    return len(values), digest(few), every


def _text(value, depth: int = 0) -> str:
    """Return an entry of a list as text, or "" if its type is unknown."""
    if isinstance(value, PurePath):
        value = str(value)
    if isinstance(value, str):  # folders may have different names on other hosts
        return "/".join(value[:2000].split("/")[-2:])
    if isinstance(value, PLAIN):
        return repr(value)
    if _is_array(value):
        return repr(numbers([torch.as_tensor(value)], 16)[0])
    if isinstance(value, dict):
        value = [x for pair in value.items() for x in pair]
    if isinstance(value, (list, tuple)) and depth < 3:
        return "|".join(_text(one, depth + 1) for one in value[:16])
    return ""


def different(what: str, values: list[tuple], rank: int) -> str:
    """Return how the contents of rank 0 and of rank `rank` differ."""
    one, other = values[0], values[rank]
    if one[0] != other[0]:
        return f"{what} has {one[0]} entries on rank 0 and {other[0]} on rank {rank}"
    if one[2] is not None and one[2] == other[2]:
        text = f"{what} has the same {one[0]} entries on ranks 0 and {rank}, but in a "
        return f"{text}different order, and a sampler divides the indices"
    return f"{what} has different contents on rank {rank} than on rank 0"


def other_contents(job: Job, labels: bool) -> str:
    """Return how samples with equal indices differ between two ranks, else ""."""
    first = feeds(job)
    begun = [p.batches(p.epochs[0]) for p in job.processes if p.epochs]
    read = [{x for one in own for x in one.indices or ()} for own in begun]
    apart = len(read) > 1 and not any(one & read[0] for one in read[1:])
    if not first or not (apart or all(one.divides for one in first)):
        return ""  # ranks may number their samples differently
    known = [contents(process, labels) for process in job.processes]
    found, shares = zip(*known, strict=True)
    for one, other in combinations(range(len(found)), 2):
        both = found[one].keys() & found[other].keys()
        differ = sum(found[one][x] != found[other][x] for x in both)
        chance = max(0.05, 3 * shares[one], 3 * shares[other])
        if differ > max(4, chance * len(both)):
            what = "labels" if labels else "contents"
            text = f"{differ} of {len(both)} samples that ranks {one} and {other} have "
            return f"{text}both read have different {what} on the two ranks"
    return ""


def contents(process: Process, labels: bool) -> tuple[dict[int, int], float]:
    """Return {index: label or hash} for samples, and the share of them that changes.

    If many change (as padding does, with the batch), the dictionary is empty.
    """
    found = {}
    for one in process.trained:
        values = one.labels if labels else one.rows
        for pair in zip(one.indices or (), values or (), strict=False):
            found.setdefault(pair[0], []).append(pair[1])
    again = [x for x in found.values() if len(x) > 1]
    stay = sum(len({*x}) == 1 for x in again)
    share = 1 - stay / max(1, len(again))
    fixed = len(again) > 4 and share < 0.1
    return {index: x[0] for index, x in found.items()} if fixed else {}, share
