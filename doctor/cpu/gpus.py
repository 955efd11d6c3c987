"""Hold the state of the emulated GPUs, replace functions, and explain errors."""

import contextlib
import os
import re
import sys
import threading
import traceback
from types import ModuleType

import torch
from torch import Tensor

CPU = torch.device("cpu")
NOT_THE_USERS = os.path.dirname(__file__), os.path.dirname(torch.__file__)
# Words in error messages of code that needs a GPU or NCCL
GPU_ONLY = """cuda|nccl|cudnn|nvml|nvidia|triton|flash_att|cupy|bitsandbytes|amp_C|
    apex_C|transformer_engine|'Half'|available.kernel|gloo.does.not.support"""
GPU_ONLY = re.compile(re.sub(r"\s", "", GPU_ONLY), re.IGNORECASE)

count = 0  # number of GPUs; play() sets it
used = False  # whether the process has used a GPU
local = threading.local()  # each thread has a current GPU and a current stream
generators: dict[int, torch.Generator] = {}  # GPU's index -> its generator
replaced: dict[int, tuple] = {}  # id -> a PyTorch function and its replacement
said: set[str] = set()


def explain(kind: type, error: BaseException, trace) -> str:
    """Return an explanation if an error is in code that needs a GPU, else ""."""
    text = "".join(traceback.format_exception(kind, error, trace))
    calls = re.findall(r'File "(.+)", line (\d+), in .*\n +(.*)', text)
    users = [one for one in calls if not one[0].startswith((*NOT_THE_USERS, "<"))]
    own = "doctor --cpu" in text or kind.__name__ == "ChildFailedError"  # torchrun's
    name = f"{kind.__module__}.{kind.__name__}: {error}"
    if own or not users or not GPU_ONLY.search(name):
        return ""
    file, line, code = users[-1]
    why = "it runs only on a GPU. Nothing after this line was checked."
    place = f"{os.path.relpath(file)}:{line}"
    return f"doctor --cpu cannot emulate `{code}` [{place}]: {why}\n"


def say(text: str) -> None:
    """Print a line once, on rank 0 only."""
    if text not in said and os.environ.get("RANK", "0") == "0":
        print(f"doctor --cpu: {text}", file=sys.stderr)
    said.add(text)


def visible() -> int:
    """Return the number of GPUs that the process may use."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return min(count, len(listed.split(","))) if listed else count


def resolve(device=None) -> torch.device:
    """Return a torch.device, with its index, for any device that PyTorch accepts.

    Raises:
        RuntimeError: if the process has no GPU with this index.
    """
    global used
    if device is None or isinstance(device, int):
        device = "cuda" if device in (None, -1) else torch.device("cuda", device)
    device = torch.device(device)
    if device.type != "cuda":
        return CPU if device.type == "cpu" else device
    used = True
    index = getattr(local, "gpu", 0) if device.index is None else device.index
    if index >= visible():
        text = f"doctor --cpu has {visible()} GPUs; set their number with --cpu N"
        raise RuntimeError(f"CUDA error: invalid device ordinal {index}: {text}")
    return torch.device("cuda", index)


def place_of(tensor: Tensor) -> torch.device:
    """Return the device of a tensor, as the job sees it."""
    try:
        return getattr(tensor.untyped_storage(), "place", CPU)
    except (NotImplementedError, RuntimeError):  # the tensor has no storage
        return CPU


def mark(result, place: torch.device):
    """Mark unmarked tensors in a result as being on `place`, and return the result."""
    if isinstance(result, (tuple, list)):
        for one in result:
            mark(one, place)
    elif isinstance(result, Tensor) and place != CPU and place_of(result) == CPU:
        with contextlib.suppress(NotImplementedError, RuntimeError):
            result.untyped_storage().place = place
    return result


def generator(device=None) -> torch.Generator:
    """Return a GPU's own random number generator."""
    index = resolve(device).index
    if index not in generators:  # by default, each process has its own seed
        generators[index] = torch._C.Generator()
        generators[index].seed()
    return generators[index]


def replace(owner: ModuleType | type, name: str, new) -> None:
    """Replace a function or class of PyTorch, if it exists."""
    if old := getattr(owner, name, None):
        replaced[id(old)] = old, new
        setattr(owner, name, new)


def replace_everywhere() -> None:
    """Replace functions in all PyTorch modules that have imported them by name."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch" and isinstance(module, ModuleType):
            for key, value in list(vars(module).items()):
                old, new = replaced.get(id(value), (None, None))
                if old is value and old is not None:
                    setattr(module, key, new)
