"""Emulate torch.cuda, torch.accelerator and PyTorch's other functions for GPUs."""

import abc
import contextlib
import functools
import inspect
import sys
import time
from collections import Counter
from types import SimpleNamespace

import torch
from torch import cuda

from . import gpus
from .gpus import generator, local, mark, replace, resolve

MEMORY = 80 * 2**30  # bytes of memory that each emulated GPU reports
GPU = SimpleNamespace(name="GPU of doctor --cpu", major=8, minor=0, warp_size=32)
GPU.total_memory, GPU.multi_processor_count, GPU.L2_cache_size = MEMORY, 108, 2**25
TRUE = "is_available is_bf16_supported is_tf32_supported can_device_access_peer".split()


class Stream:
    """A stream that completes all work immediately."""

    cuda_stream = stream_id = device_index = priority = 0

    def __init__(self, device=None, priority=0, **kwargs):
        self.device = resolve(device)

    def wait_stream(self, *args): ...

    wait_event = synchronize = is_capturing = wait_stream

    def query(self) -> bool:
        return True

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self):
        self.outer, local.stream = current_stream(), self
        return self

    def __exit__(self, *error):
        local.stream = self.outer


class Event:
    """An event that stores the time at which it was recorded."""

    wait, synchronize, query, cuda_event = *[Stream.wait_stream] * 2, Stream.query, 0

    def __init__(self, *args, **kwargs):
        self.time = 0.0

    def record(self, stream=None) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, end) -> float:
        return 1000 * (end.time - self.time)


class Generator(torch._C.Generator):
    """A random number generator, possibly on a GPU."""

    device = property(lambda self: self.place)

    def __new__(cls, device="cpu"):
        self = super().__new__(cls)
        self.place = resolve(device)
        return self


class OldType(type):
    """The metaclass of tensor types such as torch.cuda.FloatTensor."""

    def __call__(cls, *args):
        return mark(getattr(torch, cls.__name__)(*args), resolve())


def current_stream(device=None) -> Stream:
    """Return the thread's current stream."""
    local.stream = getattr(local, "stream", None) or Stream(device)
    return local.stream


def set_device(device) -> int:
    """Set the thread's current GPU, and return the previous GPU's index."""
    before, index = getattr(local, "gpu", 0), resolve(device).index
    local.gpu = before if index is None else index
    return before


def set_rng_state(state: torch.Tensor, device="cuda") -> None:
    """Set the state of an emulated GPU's generator; ignore a state from a real GPU."""
    if state.numel() == generator(device).get_state().numel():
        generator(device).set_state(state.cpu())


def each(call) -> list:
    """Call a function with the index of each GPU, and return a list of the results."""
    return [call(index) for index in range(gpus.visible())]


PLAYED = {
    "is_initialized": lambda: gpus.used,
    "is_current_stream_capturing": lambda: False,  # record.py calls it
    "device_count": gpus.visible,
    "current_device": lambda: resolve().index,
    "set_device": set_device,
    "_exchange_device": set_device,
    "_maybe_exchange_device": set_device,
    "get_device_name": lambda device=None: GPU.name,
    "get_device_capability": lambda device=None: (8, 0),
    "get_device_properties": lambda device=None: GPU,
    "current_stream": current_stream,
    "default_stream": current_stream,
    "set_stream": lambda stream: setattr(local, "stream", stream),
    "stream": lambda stream: stream or contextlib.nullcontext(),
    "StreamContext": lambda stream: stream or contextlib.nullcontext(),
    "Stream": Stream,
    "Event": Event,
    "mem_get_info": lambda device=None: (MEMORY, MEMORY),
    "memory_stats": lambda device=None: Counter(),
    "manual_seed": lambda seed: generator().manual_seed(seed) and None,
    "manual_seed_all": lambda seed: each(lambda i: generator(i).manual_seed(seed)),
    "initial_seed": lambda device=None: generator(device).initial_seed(),
    "get_rng_state": lambda device="cuda": generator(device).get_state(),
    "get_rng_state_all": lambda: each(lambda i: generator(i).get_state()),
    "set_rng_state": set_rng_state,
    "set_rng_state_all": lambda states: each(lambda i: set_rng_state(states[i], i)),
    "current_accelerator": lambda check_available=False: torch.device("cuda"),
    "current_device_index": lambda: resolve().index,
    "set_device_index": set_device,
    "device_index": type("device_index", (cuda.device,), {}),
    "_lazy_init": lambda: None,
}


def other(name: str):
    """Return a replacement for a function that reads a GPU's properties or memory."""

    def call(*args, **kwargs):
        if name in TRUE:
            return True
        return 0 if "memory" in name and not name.startswith(("re", "set")) else None

    return call


def copy_of(call):
    """Return a copy of a function; return a class unchanged."""
    if isinstance(call, type):
        return call
    return functools.wraps(call)(lambda *args, **kwargs: call(*args, **kwargs))


def play_modules(*modules) -> None:
    """Replace modules' functions; torch.compile() requires distinct replacements."""
    new = {name: copy_of(call) for name, call in PLAYED.items()}
    names = [one.__name__ for one in modules]
    for module in modules:
        for name, old in list(vars(module).items()):
            function = inspect.isfunction(old) and old.__module__ in names
            driver = function and "nvml" in str(old.__code__.co_names)
            function = function and (name in TRUE or not driver)
            if name not in new and function and name[0] != "_":
                if not inspect.isgeneratorfunction(inspect.unwrap(old)):
                    new[name] = other(name)
            if name in new:
                replace(module, name, new[name])


def restore(storage, location: str):
    """Mark and return a storage that torch.load() puts on a GPU, else return None."""
    if not location.startswith("cuda"):
        return None
    getattr(storage, "_untyped_storage", storage).place = resolve(location)
    return storage


def storage_to_gpu(storage, device=None, non_blocking=False):
    """Emulate storage.cuda(), which map_location functions call."""
    return restore(storage.clone(), str(resolve(device)))


def place_in_file(storage) -> str | None:
    """Return the name of the GPU that torch.save() writes for a storage, or None."""
    place = getattr(getattr(storage, "_untyped_storage", storage), "place", None)
    return place and str(place)


def install() -> None:
    """Replace functions of torch.cuda and similar modules; explain fatal errors."""
    previous = sys.excepthook

    def excepthook(kind, error, trace) -> None:
        previous(kind, error, trace)
        print(end=gpus.explain(kind, error, trace), file=sys.stderr)

    play_modules(cuda, cuda.memory, cuda.random, cuda.nvtx, cuda.profiler)
    names = "torch.accelerator", "torch.accelerator.memory"
    play_modules(*[sys.modules[one] for one in names if one in sys.modules])
    for name in [one for one in vars(cuda) if one.endswith("Tensor")]:
        setattr(cuda, name, OldType(name, (), {"__module__": "torch.cuda"}))
    for owner, name, call in (
        (torch, "Generator", Generator),
        (torch, "Stream", Stream),
        (torch, "Event", Event),
        (torch.Tensor, "record_stream", lambda tensor, stream: None),
        (torch.storage._StorageBase, "cuda", storage_to_gpu),
        (cuda.nccl, "version", lambda: (2, 21, 5)),
        (torch.backends.cuda, "is_built", lambda: True),
        (torch.backends.cudnn, "is_available", lambda: True),
        (torch.backends.cudnn, "is_acceptable", lambda tensor: False),
        (torch.backends.cudnn, "version", lambda: 90100),
    ):
        replace(owner, name, call)
    bases = sys.modules.get("torch._streambase")
    if isinstance(getattr(bases, "_EventBase", None), abc.ABCMeta):  # before 2.5
        bases._StreamBase.register(Stream)
        bases._EventBase.register(Event)
    torch.version.cuda = torch.version.cuda or "12.8"
    torch.serialization.register_package(1, place_in_file, restore)
    sys.excepthook = excepthook
