"""The states of random generators."""

import ctypes
import hashlib
import random
import sys


def states(dataset: object = None) -> dict[str, tuple[int, int]]:
    """Return a hash and the position of each global generator, and a data set's own."""
    import torch

    state = content(torch.random.default_generator.get_state())
    found = {"torch": (hashed(state), int.from_bytes(state[16:20], "little"))}
    state = random.getstate()[1]
    found["random"] = hash(state), state[-1]
    if numpy := sys.modules.get("numpy"):
        _, keys, position, *_ = numpy.random.get_state()
        state = keys.tobytes() + str(position).encode()
        found["numpy"] = hashed(state), position
    if torch.cuda.is_initialized():
        state = content(torch.cuda.get_rng_state())
        found["cuda"] = hashed(state), int.from_bytes(state[8:16], "little")
    for name, own in getattr(dataset, "__dict__", {}).items():
        bits = getattr(own, "bit_generator", getattr(own, "_bit_generator", None))
        if isinstance(own, torch.Generator):
            found[f"its {name}"] = hashed(content(own.get_state())), 0
        elif isinstance(own, random.Random):
            found[f"its {name}"] = hash(own.getstate()[1]), 0
        elif bits is not None:
            found[f"its {name}"] = hashed(repr(bits.state).encode()), 0
    return found


def content(state) -> bytes:
    """Return the bytes of a generator's state, a CPU tensor; NumPy may be missing."""
    return ctypes.string_at(state.data_ptr(), state.numel())


def hashed(state: bytes) -> int:
    """Return a hash of a generator's state."""
    return int.from_bytes(hashlib.blake2b(state, digest_size=7).digest(), "big")


def drawn(before: dict, after: dict) -> tuple[dict[str, int], int]:
    """Return the hashes of generators that drew, and a lower bound on the draws."""
    changed = {k: x for k, x in before.items() if k in after and after[k] != x}
    counts = [0]
    for name, (_, position) in changed.items():
        moved = after[name][1] - position
        counts.append(moved if name == "cuda" else moved % 624 or 624)
    return {name: value[0] for name, value in changed.items()}, max(counts)
