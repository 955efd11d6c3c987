"""Intercept PyTorch's functions to emulate devices and moves between them."""

import re
import sys
import threading

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _device

from .gpus import CPU, mark, place_of, replace, resolve

# Words in the names of functions that draw random numbers
DRAWS = """rand normal uniform dropout bernoulli multinomial exponential poisson cauchy
    geometric rrelu gumbel fractional_max_pool multi_head_attention lstm gru rnn_tanh
    rnn_relu scaled_dot_product""".split()
DRAWS = re.compile("|".join(DRAWS))
drawing = threading.Lock()


def place_among(values) -> torch.device:
    """Return the GPU of the first marked tensor in nested lists, or the CPU if none."""
    for value in values:
        found = place_of(value) if isinstance(value, Tensor) else CPU
        if isinstance(value, (tuple, list)) and value:
            found = CPU if isinstance(value[0], (int, float)) else place_among(value)
        if found != CPU:
            return found
    return CPU


def moved(source: Tensor, result: Tensor, place: torch.device) -> Tensor:
    """Mark and return a tensor moved to `place`; copy it if the move did not."""
    if place != place_of(result) and result is source:
        result = source.clone()
    return mark(result, place)


def general(func, args: tuple, kwargs: dict):
    """Call a function, which may draw random numbers of the GPU; mark its results."""
    place, device = place_among((*args, *kwargs.values())), kwargs.get("device")
    if device is None and func in _device._device_constructors():
        device = _device.CURRENT_DEVICE
    if device is not None:
        place = resolve(device)
        kwargs["device"] = CPU if place.type == "cuda" else place
    kwargs.pop("pin_memory", None)
    draws = place.type == "cuda" and DRAWS.search(getattr(func, "__name__", ""))
    if draws and kwargs.get("generator") is None:
        gpu = torch.cuda.default_generators[place.index]
        default = torch.default_generator
        with drawing, torch.random.fork_rng(devices=[]):
            default.set_state(gpu.get_state())
            result = func(*args, **kwargs)
            gpu.set_state(default.get_state())
    else:
        result = func(*args, **kwargs)
    if args and result is args[0]:
        return result if device is None else moved(result, result, place)
    return mark(result, place)


def to(func, args: tuple, kwargs: dict):
    """Emulate Tensor.to(), whose first argument is a device, a dtype or a tensor."""
    source, *rest = args
    first = rest[0] if rest else kwargs.get("device", kwargs.get("other"))
    place = place_of(first if isinstance(first, Tensor) else source)
    if isinstance(first, (str, int, torch.device)):
        place = resolve(first)
        real = CPU if place.type == "cuda" else place
        rest = [real if one is first else one for one in rest]
        kwargs = {name: real if one is first else one for name, one in kwargs.items()}
    return moved(source, func(source, *rest, **kwargs), place)


def convert(func, args: tuple, kwargs: dict):
    """Emulate Tensor.type(), which returns a type's name or converts to a type."""
    place, wanted = place_of(args[0]), str(args[1:])
    if "cuda" in wanted:  # such as torch.cuda.FloatTensor
        name = "torch." + wanted.rpartition(".")[2].strip(")>,'")
        return moved(args[0], func(args[0], name), resolve())
    result = mark(func(*args, **kwargs), place)
    horovod = sys._getframe(2).f_globals.get("__name__", "").startswith("horovod.")
    named = isinstance(result, str) and place.type == "cuda" and not horovod
    return result.replace("torch.", "torch.cuda.") if named else result


def parse_to(func, args: tuple, kwargs: dict):
    """Emulate the part of Module.to() that reads arguments; they may be GPU indices."""
    args = [resolve(one) if type(one) is int else one for one in args]
    if type(kwargs.get("device")) is int:
        kwargs["device"] = resolve(kwargs["device"])
    return func(*args, **kwargs)


ways = {  # function -> its emulation; general() emulates all functions not named here
    Tensor.to: to,
    Tensor.cuda: lambda func, args, kwargs: moved(
        args[0], args[0], resolve(kwargs.get("device", *args[1:2]))
    ),
    Tensor.cpu: lambda func, args, kwargs: moved(args[0], args[0], CPU),
    Tensor.type: convert,
    Tensor.pin_memory: lambda func, args, kwargs: args[0].clone(),
    Tensor.get_device: lambda func, args, kwargs: (
        -1 if place_of(args[0]) == CPU else place_of(args[0]).index
    ),
    Tensor.device.__get__: lambda func, args, kwargs: place_of(args[0]),
    Tensor.is_cuda.__get__: lambda func, args, kwargs: place_of(args[0]).type == "cuda",
    Tensor.is_cpu.__get__: lambda func, args, kwargs: place_of(args[0]) == CPU,
    # The index may be on another device
    Tensor.__getitem__: lambda func, args, kwargs: mark(func(*args), place_of(args[0])),
    torch._C._nn._parse_to: parse_to,
}


class PlayedGpus(TorchFunctionMode):
    """Intercepts all calls of PyTorch's functions."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        way = ways.get(getattr(func, "__wrapped__", func), general)
        return way(func, args, kwargs or {})


played = PlayedGpus()


def within(call):
    """Return a function that always runs in the mode `played`."""

    def wrapped(*args, **kwargs):
        if played in _get_current_function_mode_stack():
            return call(*args, **kwargs)
        with played:
            return call(*args, **kwargs)

    return wrapped


def install() -> None:
    """Start emulation in this thread, in later threads and in backward passes."""
    # Each thread begins here, even if its class overrides run()
    threading.Thread._bootstrap_inner = within(threading.Thread._bootstrap_inner)
    push = torch._C._autograd._push_saved_tensors_default_hooks
    replace(torch._C._autograd, push.__name__, lambda *both: push(*map(within, both)))
    engine = torch.autograd.graph._engine_run_backward
    replace(torch.autograd.graph, "_engine_run_backward", within(engine))
    played.__enter__()
