"""Tell data sets apart by what they contain."""

import contextlib
import warnings
from collections import deque
from pathlib import PurePath

from .loaders import inside
from .sample import digest, hashes, numbers, positions

FEW, ALL = 64, 5000  # entries that are looked at; and for their sum
PLAIN = int, float, str, bytes, bool, complex, type(None)


def signature(dataset) -> dict[str, tuple[int, int, int | None]]:
    """Return what a data set's lists and arrays contain, by the names of attributes.

    The three numbers are the length, a hash of a few entries in their order, and one of
    all entries in any order (None if there are many).
    """
    found = {}
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # arrays that cannot be written
        _search(inside(dataset)[0], "", 0, found)
    return found


def plain(dataset) -> dict[str, float]:
    """Return the numbers that are attributes of a data set, and of those inside it."""
    found = {}
    with contextlib.suppress(Exception):
        for _ in range(4):
            for name, one in [*vars(dataset).items()][:40]:
                if isinstance(one, (int, float)):
                    found[f"{type(dataset).__name__}.{name}"] = one
            dataset = dataset.dataset
    return found


def _search(value, name: str, depth: int, found: dict) -> None:
    import torch

    if isinstance(value, (torch.nn.Module, *PLAIN)) or len(found) > 40:
        return
    if _is_array(value):
        if value.ndim and len(value) > 1:
            rows = torch.as_tensor(value)
            few = digest(hashes(rows[list(positions(len(rows), FEW))]))
            every = sum(hashes(rows, 16)) if len(rows) <= ALL else None
            found[name] = len(rows), few, every
    elif type(value).__module__.startswith("datasets."):  # Hugging Face's
        if hasattr(value, "_indices"):  # value[i] would call the user's transform
            chosen = value._indices and value._indices.column(0).to_pylist()
            few = [chosen[i] if chosen else i for i in positions(len(value), 16)]
            found[name] = _entries([value._data.slice(i, 1).to_pylist() for i in few])
    elif isinstance(value, (list, tuple, deque)):
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
    import torch

    if isinstance(value, torch.Tensor):
        return value.layout == torch.strided and not value.is_complex()
    return type(value).__name__ == "ndarray" and value.dtype.kind in "biuf"


def _entries(values) -> tuple[int, int, int | None]:
    few = digest([_text(values[i]) for i in positions(len(values), FEW)])
    every = sum(digest(_text(one)) for one in values) if len(values) <= ALL else None
    return len(values), few, every


def _text(value, depth: int = 0) -> str:
    """Return an entry of a list as text; "" if its type is not known."""
    if isinstance(value, PurePath):
        value = str(value)
    if isinstance(value, str):  # folders may have other names on other hosts
        return "/".join(value[:2000].split("/")[-2:])
    if isinstance(value, PLAIN):
        return repr(value)
    if _is_array(value):
        import torch

        return repr(numbers([torch.as_tensor(value)], 16)[0])
    if isinstance(value, dict):
        value = [x for pair in value.items() for x in pair]
    if isinstance(value, (list, tuple)) and depth < 3:
        return "|".join(_text(one, depth + 1) for one in value[:16])
    return ""


def different(what: str, values: list[tuple], rank: int) -> str:
    """Return how the contents of ranks 0 and `rank` differ."""
    one, other = values[0], values[rank]
    if one[0] != other[0]:
        return f"{what} has {one[0]} entries on rank 0 and {other[0]} on rank {rank}"
    if one[2] is not None and one[2] == other[2]:
        text = f"{what} has the same {one[0]} entries on ranks 0 and {rank}, but in a "
        return f"{text}different order, and a sampler divides their numbers"
    return f"{what} has different contents on rank {rank} than on rank 0"
