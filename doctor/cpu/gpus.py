"""The played GPUs: their number, tensors, random numbers, and what cannot be played."""

import os
import re
import sys
import threading
import traceback
from collections.abc import Callable
from types import ModuleType

import torch

CPU = torch.device("cpu")
OWN = os.path.dirname(os.path.abspath(__file__))
TORCH = os.path.dirname(torch.__file__)
# Packages and words in errors of code that needs a real GPU
GPU_ONLY = r"""(?i)cuda|nccl|cudnn|nvml|nvidia|triton|flash.?attn|cupy|bitsandbytes
    |transformer.engine|\bamp_C\b|\bapex_C\b|fused_layer_norm|no kernel image"""
GPU_ONLY = re.compile(GPU_ONLY, re.VERBOSE)

count = 0  # GPUs of this process; play() sets it
used = False  # whether the process has used a GPU
local = threading.local()  # as in CUDA, each thread has a current device and stream
generators: dict[int, torch.Generator] = {}  # of the GPUs, by their index
replaced: dict[int, tuple] = {}  # by id: a function of PyTorch, and its replacement
printed: set[str] = set()


class CannotPlay(RuntimeError):
    """A call that only a GPU can carry out."""

    def __init__(self, name: str):
        super().__init__(cannot_play(name, line_of_the_user()))


def cannot_play(name: str, where: str) -> str:
    """Return the line that ends a job which --cpu cannot play."""
    text = f"doctor --cpu cannot play {name} [{where}]: it runs only on a GPU."
    return f"{text} Nothing after this line was checked."


def line_of_the_user() -> str:
    """Return the innermost line outside PyTorch and this folder as file:line."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith((OWN, TORCH, "<")):
        frame = frame.f_back
    return f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"


def say(text: str) -> None:
    """Print a line once, in rank 0 alone."""
    if text not in printed and os.environ.get("RANK", "0") == "0":
        print(f"doctor --cpu: {text}", file=sys.stderr)
    printed.add(text)


def explain(kind: type, error: BaseException, trace) -> str:
    """Return the line about an error of code that needs a GPU; else an empty string."""
    if isinstance(error, CannotPlay):
        return str(error)
    text = "".join(traceback.format_exception(kind, error, trace))
    calls = re.findall(r'File "(.+)", line (\d+), in .*\n +(.*)', text)
    users = [one for one in calls if not one[0].startswith((OWN, TORCH))]
    if "doctor --cpu cannot play" in text or not users:
        return ""
    if not GPU_ONLY.search(f"{kind.__module__}.{kind.__name__}: {error}"):
        return ""
    file, line, code = users[-1]
    return cannot_play(f"`{code}`", f"{os.path.relpath(file)}:{line}")


def visible() -> int:
    """Return the number of GPUs that the process can use."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return min(count, len(listed)) if listed != [""] else count


def current() -> int:
    """Return the index of the thread's current GPU."""
    return getattr(local, "gpu", 0)


def resolve(device) -> torch.device:
    """Return a device with its index, from any of the forms that PyTorch takes.

    Raises:
        RuntimeError: if the process has no GPU with this index.
    """
    global used
    if device is None or isinstance(device, int):
        device = torch.device("cuda", current() if device in (None, -1) else device)
    elif isinstance(device, str):
        device = torch.device(device)
    if device.type != "cuda":
        return CPU if device.type == "cpu" else device
    used, index = True, current() if device.index is None else device.index
    if index >= visible():
        text = f"CUDA error: invalid device ordinal {index}: doctor --cpu plays"
        raise RuntimeError(f"{text} {visible()} GPUs, and --cpu N plays N")
    return torch.device("cuda", index)


def place_of(tensor: torch.Tensor) -> torch.device:
    """Return the device that a tensor is on, as the job sees it."""
    try:
        return getattr(tensor.untyped_storage(), "place", CPU)
    except (NotImplementedError, RuntimeError):  # sparse, or without memory
        return CPU if not tensor.is_sparse else place_of(tensor._values())


def put(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    """Mark a tensor's storage, unless it is marked already, and return the tensor."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return put(tensor._values(), place) and tensor if tensor.is_sparse else tensor
    if storage.device.type == "cpu" and not hasattr(storage, "place"):
        storage.place = place
    return tensor


def generator(device=None) -> torch.Generator:
    """Return a GPU's own random number generator."""
    index = resolve(device).index
    if index not in generators:
        generators[index] = torch._C.Generator().manual_seed(67280421310721)
    return generators[index]


def name_of_type(kind) -> str:
    """Return the name of a tensor's type, such as torch.cuda.FloatTensor."""
    return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"


def replace(owner: ModuleType | type, name: str, new: Callable) -> Callable | None:
    """Replace a function or class of PyTorch, and return the old one."""
    old = getattr(owner, name, None)
    if old is not None:
        replaced[id(old)] = old, new
        setattr(owner, name, new)
    return old


def replace_everywhere() -> None:
    """Replace the functions in the modules of PyTorch that imported them by name."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch" and isinstance(module, ModuleType):
            for key, value in list(vars(module).items()):
                old, new = replaced.get(id(value), (None, None))
                if old is value and old is not None:
                    setattr(module, key, new)
