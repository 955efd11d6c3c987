"""Read a few numbers from large tensors, and compute hashes."""

import functools
import hashlib
from array import array
from collections.abc import Sequence
from itertools import islice

from .record import torch

GOLDEN = 0.6180339887498949
MOST = 1024  # maximum count of numbers in one event


@functools.lru_cache(512)
def positions(count: int, most: int) -> tuple[int, ...]:
    """Return up to `most` of the positions 0 to `count` - 1, spread irregularly."""
    if count <= most:
        return tuple(range(count))
    # With a fixed stride, all positions could be in the same column of a matrix
    return tuple(sorted({int(n * GOLDEN % 1 * count) for n in range(1, most + 1)}))


@functools.lru_cache(512)
def _index(count: int, most: int, device):
    return torch.tensor(positions(count, most), device=device)


def few(tensor, most: int):
    """Return a few numbers of a tensor: (at most `most`,), on its device."""
    if tensor.is_sparse:  # use column sums, which add up over ranks
        tensor = tensor._values().sum(0)
    tensor, count = tensor.detach(), tensor.numel()
    if count <= most:
        return tensor.reshape(-1)
    index = _index(count, most, tensor.device)
    if tensor.is_floating_point() and tensor.element_size() > 1:
        return tensor.take(index)  # copies nothing, also with channels_last
    return tensor.reshape(-1)[index]


def picked(tensor, most: int):
    """Return a copy of a few numbers: (at most `most`,) float64, on the same device."""
    return few(tensor, most).to(torch.float64, copy=True)


def numbers(tensors: Sequence, most: int = 8) -> list[list[float]]:
    """Return a few numbers of each tensor ([] for None or meta), in one copy."""
    parts = [None if x is None or x.is_meta else few(x, most) for x in tensors]
    there = [x for x in parts if x is not None]
    if len({(x.dtype, x.device) for x in there}) > 1:
        there = [x.to(there[0].device, torch.float64) for x in there]
    left = iter(torch.cat(there).double().tolist() if there else ())
    return [[] if x is None else [*islice(left, x.numel())] for x in parts]


def flat(rows: list[list[float]]) -> tuple[int, list[float]]:
    """Return (numbers per row, one list of all rows' first numbers, or zeros)."""
    each = max(1, min(8, MOST // max(1, len(rows))))
    return each, [x for row in rows for x in (row + [0.0] * each)[:each]]


def hashes(rows, most: int = 64) -> list[int]:
    """Return a hash of each row of a tensor (N, ...), the same in all processes."""
    flat = rows.detach().reshape(len(rows), -1)
    if flat.size(1) > most:
        flat = flat[:, _index(flat.size(1), most, flat.device)]
    bits = flat.double().contiguous().view(torch.int64)
    bits = bits ^ (bits >> 29)
    mixed = (bits * torch.tensor(_odd(flat.size(1)), device=flat.device)).sum(1)
    return ((mixed ^ (mixed >> 31)) & (2**62 - 1)).tolist()


@functools.lru_cache(512)
def _odd(count: int) -> list[int]:
    return [digest(n) | 1 for n in range(count)]


def digest(*values) -> int:
    """Return a hash of values that, unlike hash(), is the same in every process."""
    data = repr(values).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")


def rows_of(inputs: list) -> array:
    """Return a hash of each entry of the largest input.

    Lists of integers with equal lengths, such as users and items, count as one input.
    """
    largest = max(inputs, key=torch.Tensor.numel)
    same = [x for x in inputs if len(x) == largest.numel() and x.dtype == largest.dtype]
    if len(same) > 1 and not largest.is_floating_point():
        return array("q", map(digest, *map(hashes, same)))
    return array("q", hashes(largest))
