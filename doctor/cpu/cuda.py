"""torch.cuda, torch.accelerator, and what else names a GPU."""

import functools
import inspect
import sys
import time
from collections import Counter
from types import SimpleNamespace

import torch
from torch import cuda

from . import gpus
from .gpus import CannotPlay, generator, local, put, replace, resolve

MEMORY = 80 * 2**30  # bytes that each played GPU says it has
PROPERTIES = SimpleNamespace(
    name="GPU played by doctor --cpu", total_memory=MEMORY, major=8, minor=0,
    multi_processor_count=108, warp_size=32, max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536, shared_memory_per_block=49152, L2_cache_size=2**25,
    is_integrated=0, is_multi_gpu_board=0, uuid="played", gcnArchName="",
)  # fmt: skip
READ_FROM_THE_DRIVER = "utilization temperature power_draw clock_rate memory_usage"
GRAPHS = "CUDAGraph graph make_graphed_callables graph_pool_handle"


class Stream:
    """A stream whose work is done as soon as it is asked for."""

    cuda_stream = stream_id = device_index = priority = 0

    def __init__(self, device=None, priority=0, **kwargs):
        self.device = resolve(device)

    def nothing(self, *args, **kwargs) -> None: ...

    wait_stream = wait_event = synchronize = nothing

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

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
    """An event that knows when it was recorded."""

    cuda_event = 0
    wait = synchronize = Stream.nothing
    query = Stream.query

    def __init__(self, *args, **kwargs):
        self.device, self.time = None, 0.0

    def record(self, stream=None) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, end) -> float:
        return 1000 * (end.time - self.time)


class StreamContext:
    """The context manager torch.cuda.stream()."""

    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        return self.stream and self.stream.__enter__()

    def __exit__(self, *error):
        return self.stream and self.stream.__exit__()


class AnyGenerator(type(torch._C.Generator)):
    """The type of Generator: PyTorch's own generators count as instances."""

    def __instancecheck__(cls, one) -> bool:
        return isinstance(one, torch._C.Generator)


class Generator(torch._C.Generator, metaclass=AnyGenerator):
    """A random number generator that may be on a GPU."""

    def __new__(cls, device="cpu"):
        self = super().__new__(cls)
        self.place = resolve(device)
        return self

    device = property(lambda self: self.place)


class OldType(type):
    """The type of the types that make tensors, such as torch.cuda.FloatTensor."""

    def __instancecheck__(cls, one) -> bool:
        of_type = getattr(torch, cls.__name__)
        return isinstance(one, torch.Tensor) and one.is_cuda and one.type(of_type)

    def __call__(cls, *args, **kwargs):
        return put(getattr(torch, cls.__name__)(*args, **kwargs), resolve(None))


def current_stream(device=None) -> Stream:
    """Return the thread's current stream."""
    if getattr(local, "stream", None) is None:
        local.stream = Stream(device)
    return local.stream


def set_device(device) -> int:
    """Choose the thread's GPU, and return the one before."""
    before, index = gpus.current(), resolve(device).index
    local.gpu = before if index is None else index
    return before


def seed(number: int, devices: range) -> None:
    """Seed the generators of GPUs."""
    for one in devices:
        generator(one).manual_seed(int(number))


def set_rng_state(state: torch.Tensor, device="cuda") -> None:
    """Set a GPU's generator, unless the state comes from a real GPU."""
    if state.numel() == generator(device).get_state().numel():
        generator(device).set_state(state.as_subclass(torch.Tensor).clone())


def everywhere() -> range:
    """Return the indices of the GPUs."""
    return range(gpus.visible())


PLAYED = {
    "is_available": lambda: True,
    "is_initialized": lambda: gpus.used,
    "_is_compiled": lambda: True,
    "_lazy_init": lambda: None,
    "is_bf16_supported": lambda including_emulation=True: True,
    "is_tf32_supported": lambda: True,
    "device_count": gpus.visible,
    "current_device": lambda: resolve(None).index,
    "set_device": set_device,
    "_exchange_device": set_device,
    "_maybe_exchange_device": set_device,
    "get_device_name": lambda device=None: PROPERTIES.name,
    "get_device_capability": lambda device=None: (8, 0),
    "get_device_properties": lambda device=None: PROPERTIES,
    "can_device_access_peer": lambda device, peer_device: True,
    "get_arch_list": lambda: ["sm_80"],
    "current_stream": current_stream,
    "default_stream": lambda device=None: Stream(device),
    "set_stream": lambda stream: setattr(local, "stream", stream),
    "stream": lambda stream: StreamContext(stream),
    "StreamContext": StreamContext,
    "Stream": Stream,
    "Event": Event,
    "mem_get_info": lambda device=None: (MEMORY, MEMORY),
    "get_memory_info": lambda device=None: (MEMORY, MEMORY),
    "memory_stats": lambda device=None: Counter(),
    "memory_snapshot": lambda *args, **kwargs: [],
    "memory_summary": lambda *args, **kwargs: "",
    "manual_seed": lambda seed_: seed(seed_, [resolve(None).index]),
    "manual_seed_all": lambda seed_: seed(seed_, everywhere()),
    "seed": lambda: generator().seed(),
    "seed_all": lambda: [generator(one).seed() for one in everywhere()],
    "initial_seed": lambda device=None: generator(device).initial_seed(),
    "get_rng_state": lambda device="cuda": generator(device).get_state(),
    "get_rng_state_all": lambda: [generator(one).get_state() for one in everywhere()],
    "set_rng_state": set_rng_state,
    "set_rng_state_all": lambda new_states: [
        set_rng_state(state, index) for index, state in enumerate(new_states)
    ],
    "current_accelerator": lambda check_available=False: torch.device("cuda"),
    "current_device_index": lambda: resolve(None).index,
    "current_device_idx": lambda: resolve(None).index,
    "set_device_index": set_device,
    "set_device_idx": set_device,
    "device_index": type("device_index", (cuda.device,), {}),
}


def other(name: str):
    """Return a function for one that tells about a GPU or changes its memory."""

    def call(*args, **kwargs):
        if name in READ_FROM_THE_DRIVER.split():
            where = gpus.line_of_the_user()
            gpus.say(f"torch.cuda.{name}() returns 0 [{where}]: there is no driver")
            return 0
        return 0 if "memory" in name and not name.startswith(("re", "set")) else None

    return call


def refuse(name: str):
    """Return a class, so that annotations work, which cannot be played."""

    def new(cls, *args, **kwargs):
        raise CannotPlay(f"torch.cuda.{name}()")

    return type(name, (), {"__new__": new})


def set_default_tensor_type(kind) -> None:
    """Set the type of new tensors by name or class, such as torch.cuda.FloatTensor."""
    name = gpus.name_of_type(kind)
    torch.set_default_dtype(getattr(torch, name.rpartition(".")[2])().dtype)
    torch.set_default_device("cuda" if ".cuda." in name else "cpu")


def restore(storage, location: str):
    """Mark a storage that torch.load() puts on a GPU; None: not on a GPU."""
    if not location.startswith("cuda"):
        return None
    getattr(storage, "_untyped_storage", storage).place = resolve(location)
    return storage


def place_in_file(storage) -> str | None:
    """Return the place of a storage that torch.save() writes, if it is on a GPU."""
    place = getattr(getattr(storage, "_untyped_storage", storage), "place", None)
    return place and str(place)


def storage_to_gpu(storage, device=None, non_blocking=False):
    """Play storage.cuda(), which functions for map_location call."""
    return restore(storage.clone(), str(resolve(device)))


def hook(previous):
    """Return a function for sys.excepthook that explains errors for lack of a GPU."""

    def excepthook(kind, error, trace) -> None:
        line = gpus.explain(kind, error, trace)
        if not isinstance(error, CannotPlay):
            previous(kind, error, trace)
        if line:
            print(line, file=sys.stderr)

    return excepthook


def alone(call):
    """Return a function of its own, because torch.compile() wants each one once."""
    if isinstance(call, type):
        return call
    return functools.wraps(call)(lambda *args, **kwargs: call(*args, **kwargs))


def play_module(modules: list) -> None:
    """Replace the functions of modules."""
    new = {name: alone(call) for name, call in PLAYED.items()}
    new |= {name: refuse(name) for name in GRAPHS.split()}
    for module in modules:
        for name, old in list(vars(module).items()):
            function = inspect.isfunction(old) and old.__module__.startswith("torch.")
            if name not in new and function and name[0] != "_":
                if not inspect.isgeneratorfunction(inspect.unwrap(old)):
                    new[name] = other(name)
            if name in new:
                replace(module, name, new[name])


def install() -> None:
    """Replace the functions of torch.cuda and its kind."""
    accelerator = [sys.modules.get(f"torch.accelerator{x}") for x in ("", ".memory")]
    play_module([cuda, cuda.memory, cuda.random, cuda.nvtx, cuda.profiler])
    play_module([one for one in accelerator if one])
    for name in [one for one in vars(cuda) if one.endswith("Tensor")]:
        setattr(cuda, name, OldType(name, (), {"__module__": "torch.cuda"}))
    cuda.nccl.is_available = lambda tensors: False  # of torch.nn.parallel.comm
    cuda.nccl.version = lambda: (2, 21, 5)
    for owner, name, call in (
        (torch, "Generator", Generator),
        (torch, "Stream", Stream),
        (torch, "Event", Event),
        (torch, "set_default_tensor_type", set_default_tensor_type),
        (torch.storage._StorageBase, "cuda", storage_to_gpu),
        (torch.backends.cuda, "is_built", lambda: True),
        (torch.backends.cudnn, "is_available", lambda: True),
        (torch.backends.cudnn, "is_acceptable", lambda tensor: False),
        (torch.backends.cudnn, "version", lambda: 90100),
    ):
        replace(owner, name, call)
    torch.version.cuda = torch.version.cuda or "12.8"
    torch.serialization.register_package(1, place_in_file, restore)
    sys.excepthook = hook(sys.excepthook)
