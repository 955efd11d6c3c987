"""Emulate torch.cuda, torch.accelerator and PyTorch's other functions for GPUs."""

import functools
import inspect
import os
import re
import sys
import time
from collections import Counter
from types import SimpleNamespace

import torch
from torch import cuda

from . import gpus
from .gpus import local, mark, replace, resolve

MEMORY = 80 * 2**30  # bytes of memory that each emulated GPU reports
GPU = SimpleNamespace(name="GPU of doctor --cpu", major=8, minor=0, warp_size=32)
GPU.total_memory, GPU.multi_processor_count, GPU.L2_cache_size = MEMORY, 108, 2**25
TRUE = "is_available is_bf16_supported is_tf32_supported can_device_access_peer".split()


def constant(value):
    """Return a new function that accepts all arguments and returns a value."""
    return lambda *args, **kwargs: value


class Stream:
    """A stream that completes all work immediately."""

    cuda_stream = stream_id = device_index = priority = 0
    wait_stream = wait_event = synchronize = __enter__ = __exit__ = constant(None)
    is_capturing = constant(False)
    query = constant(True)

    def __init__(self, device=None, priority=0, **kwargs):
        self.device = resolve(device)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event


class Event:
    """An event that stores the time at which it was recorded."""

    wait = synchronize = constant(None)
    query = constant(True)

    def __init__(self, *args, **kwargs):
        self.time = 0.0

    def record(self, stream=None) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, end) -> float:
        return 1000 * (end.time - self.time)


class OldType(type):
    """The metaclass of tensor types such as torch.cuda.FloatTensor."""

    def __call__(cls, *args):
        return mark(getattr(torch, cls.__name__)(*args), resolve())


def set_device(device) -> int:
    """Set the thread's current GPU, and return the previous GPU's index."""
    before, index = getattr(local, "gpu", 0), resolve(device).index
    local.gpu = before if index is None else index
    return before


# torch.compile() requires that functions with different names are different objects
PLAYED = {name: constant(True) for name in TRUE} | {
    "is_initialized": lambda: cuda._initialized,
    "is_current_stream_capturing": constant(False),  # record.py calls it
    "device_count": gpus.visible,
    "current_device": lambda: resolve().index,
    "current_device_index": lambda: resolve().index,
    "set_device": set_device,
    "set_device_index": lambda device: set_device(device),
    "_exchange_device": lambda device: set_device(device),
    "_maybe_exchange_device": lambda device: set_device(device),
    "device_index": type("device_index", (cuda.device,), {}),
    "get_device_name": constant(GPU.name),
    "get_device_capability": constant((GPU.major, GPU.minor)),
    "get_device_properties": constant(GPU),
    "Stream": Stream,
    "Event": Event,
    "current_stream": lambda device=None: Stream(device),
    "default_stream": lambda device=None: Stream(device),
    "mem_get_info": constant((MEMORY, MEMORY)),
    "memory_stats": lambda device=None: Counter(),
    "current_accelerator": lambda check_available=False: torch.device("cuda"),
    "_lazy_init": constant(None),
    "_lazy_call": lambda call, **kwargs: call(),
}
# The other functions of these modules return 0, unless their code names one of KEPT:
# calls of NVML end the job, and contexts call functions that are replaced
MODULES = """torch.cuda torch.cuda.memory torch.cuda.nvtx torch.cuda.profiler
    torch.accelerator torch.accelerator.memory""".split()
KEPT = re.compile("nvml|GeneratorContextManager|StreamContext")


def to_gpu(storage, device=None, non_blocking=False):
    """Emulate storage.cuda(), which map_location functions call."""
    storage = storage.clone()
    storage.place = resolve(device)
    return storage


def install() -> None:
    """Replace functions of torch.cuda and similar modules; explain fatal errors."""
    old_init, old_compile = torch.autocast.__init__, torch.compile
    old_enabled, old_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype

    def compile(*args, **kwargs):
        gpus.say("torch.compile() compiles nothing: the code runs as it is written")
        return old_compile(*args, **kwargs)

    def init(self, *args, **kwargs):
        old_init(self, *args, **kwargs)
        if self.device == "cuda" and self._enabled:
            dtype = self.fast_dtype
            gpus.say(f"autocast({dtype}) casts the same operations as CPU autocast")
        self.device = self.device.replace("cuda", "cpu")

    def get_autocast_dtype(device_type="cuda") -> torch.dtype:
        played = old_enabled("cpu") and device_type == "cuda"
        return old_dtype("cpu" if played else device_type)

    def is_autocast_enabled(device_type="cuda") -> bool:
        return old_enabled(device_type.replace("cuda", "cpu"))

    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    sys.excepthook = functools.partial(gpus.explain, sys.excepthook)
    for module in filter(None, map(sys.modules.get, MODULES)):
        for name, old in list(vars(module).items()):
            own = inspect.isfunction(old) and old.__module__ == module.__name__
            if name in PLAYED:
                replace(module, name, PLAYED[name])
            elif own and name[0] != "_" and not KEPT.search(str(old.__code__.co_names)):
                replace(module, name, constant(0))
    for name in [one for one in vars(cuda) if one.endswith("Tensor")]:
        setattr(cuda, name, OldType(name, (), {"__module__": "torch.cuda"}))
    cuda.default_generators = [*map(gpus.Generator, range(gpus.count))]
    for generator in cuda.default_generators:  # each process has its own seeds
        generator.seed()
    cuda._initialized = False
    for owner, name, new in (
        (torch, "compile", compile),
        (torch.autocast, "__init__", init),
        (torch, "get_autocast_dtype", get_autocast_dtype),
        (torch, "get_autocast_gpu_dtype", lambda: get_autocast_dtype()),
        (torch, "is_autocast_enabled", is_autocast_enabled),
        (torch, "Generator", gpus.Generator),
        (torch, "Stream", Stream),
        (torch, "Event", Event),
        (sys.modules.get("torch._streambase"), "_StreamBase", object),  # before 2.5
        (sys.modules.get("torch._streambase"), "_EventBase", object),
        (torch.Tensor, "record_stream", lambda tensor, stream: None),
        (torch.storage._StorageBase, "cuda", to_gpu),
        (cuda.nccl, "version", lambda: (2, 21, 5)),
        (torch.backends.cuda, "is_built", lambda: True),
        (torch.backends.cudnn, "is_available", lambda: True),
        (torch.backends.cudnn, "is_acceptable", lambda tensor: False),
        (torch.backends.cudnn, "version", lambda: 90100),
    ):
        replace(owner, name, new)
    torch.version.cuda = torch.version.cuda or "12.8"
    torch.serialization.register_package(
        1,  # a priority before PyTorch's own
        lambda storage: str(storage.place) if hasattr(storage, "place") else None,
        lambda storage, name: to_gpu(storage, name) if "cuda" in name else None,
    )
