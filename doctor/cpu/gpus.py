"""Hold the state of the emulated GPUs, replace functions, and explain errors."""

import contextlib
import functools
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
GPU_ONLY = """cuda nccl cudnn nvml nvidia triton flash_att cupy bitsandbytes amp_C
    apex_C transformer_engine 'Half' available.kernel gloo.does.not.support""".split()

count = 0  # number of GPUs; play() sets it
local = threading.local()  # each thread has a current GPU
replaced: dict[int, tuple] = {}  # id -> a PyTorch function and its replacement


def explain(previous, kind: type, error: BaseException, trace) -> None:
    """Print an error with the previous hook, and explain it if the code needs a GPU."""
    previous(kind, error, trace)
    text = "".join(traceback.format_exception(kind, error, trace))
    calls = re.findall(r'File "(.+)", line (\d+), in .*\n +(.*)', text)
    users = [one for one in calls if not one[0].startswith((*NOT_THE_USERS, "<"))]
    own = "doctor --cpu" in text or kind.__name__ == "ChildFailedError"  # torchrun's
    found = re.search("|".join(GPU_ONLY), f"{kind}: {error}", re.IGNORECASE)
    if users and found and not own:
        file, line, code = users[-1]
        why = "it runs only on a GPU. Nothing after this line was checked."
        text = f"doctor --cpu cannot emulate `{code}` [{os.path.relpath(file)}:{line}]"
        print(f"{text}: {why}", file=sys.stderr)


@functools.cache
def say(text: str) -> None:
    """Print a line once, on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(f"doctor --cpu: {text}", file=sys.stderr)


def visible() -> int:
    """Return the number of GPUs that the process may use."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return min(count, len(listed.split(","))) if listed else count


def resolve(device=None) -> torch.device:
    """Return any device as a torch.device; raise RuntimeError if the GPU is missing."""
    if device is None or isinstance(device, int):
        device = "cuda" if device in (None, -1) else torch.device("cuda", device)
    device = torch.device(device)
    if device.type != "cuda":
        return CPU if device.type == "cpu" else device
    torch.cuda._initialized = True
    index = getattr(local, "gpu", 0) if device.index is None else device.index
    if index >= visible():
        text = f"doctor --cpu has {visible()} GPUs; set their number with --cpu N"
        raise RuntimeError(f"CUDA error: invalid device ordinal {index}: {text}")
    return torch.device("cuda", index)


def place_of(tensor: Tensor) -> torch.device:
    """Return the device of a tensor, as the job sees it."""
    try:
        return getattr(tensor.untyped_storage(), "place", tensor.device)
    except (NotImplementedError, RuntimeError):  # the tensor has no storage
        return tensor.device


def mark(result, place: torch.device):
    """Mark unmarked tensors in a result as being on `place`, and return the result."""
    if place.type != "cuda":
        return result
    if isinstance(result, (tuple, list)):
        for one in result:
            mark(one, place)
    elif isinstance(result, Tensor) and place_of(result) == CPU:
        with contextlib.suppress(NotImplementedError, RuntimeError):
            result.untyped_storage().place = place
    return result


class Generator(torch._C.Generator):
    """A random number generator, possibly on a GPU."""

    device = property(lambda self: self.place)

    def __new__(cls, device="cpu"):
        self = super().__new__(cls)
        self.place = resolve(device)
        return self

    def set_state(self, state: Tensor) -> None:
        if state.numel() == self.get_state().numel():  # ignore a real GPU's state
            super().set_state(state)


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
                if id(value) in replaced:
                    setattr(module, key, replaced[id(value)][1])
