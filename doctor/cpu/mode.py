"""Intercept PyTorch's functions to emulate devices and moves between them."""

import sys
import threading

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _device

from . import gpus
from .gpus import CPU, mark, place_of, resolve

# Functions that return no tensor, or a tensor that shares the first one's storage
PLAIN = set(
    """size dim numel stride is_contiguous untyped_storage item tolist numpy
    backward register_hook detach view view_as expand_as data_ptr requires_grad_ set_
    share_memory_ is_floating_point is_complex element_size storage _typed_storage
    __len__ __format__ __repr__ __bool__ __float__ __int__ __index__ __reduce_ex__
    __hash__ __contains__""".split()
)
DRAWS = """rand normal uniform dropout bernoulli multinomial exponential poisson cauchy
    geometric rrelu gumbel fractional_max_pool multi_head_attention lstm gru rnn_tanh
    rnn_relu scaled_dot_product""".split()
drawing = threading.Lock()


def is_device(value: object) -> bool:
    """Return whether an argument of .to() names a device."""
    return isinstance(value, (str, int, torch.device)) and not isinstance(value, bool)


def moved(source: Tensor, result: Tensor, place: torch.device) -> Tensor:
    """Mark and return a tensor moved to `place`; copy it if the move did not."""
    if place != place_of(result) and result is source:
        result = source.clone()
    return mark(result, place)


def place_among(values) -> torch.device:
    """Return the GPU of the first marked tensor in nested lists, or the CPU if none."""
    for value in values:
        found = place_of(value) if isinstance(value, Tensor) else CPU
        if isinstance(value, (tuple, list)) and value:
            found = CPU if isinstance(value[0], (int, float)) else place_among(value)
        if found != CPU:
            return found
    return CPU


def draw(func, args: tuple, kwargs: dict, place: torch.device):
    """Call a function that may draw random numbers from the device's generator."""
    if place == CPU or kwargs.get("generator") is not None:
        return func(*args, **kwargs)
    default, gpu = torch.random.default_generator, gpus.generator(place)
    with drawing:
        before = default.get_state()
        default.set_state(gpu.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            gpu.set_state(default.get_state())
            default.set_state(before)


def general(func, args: tuple, kwargs: dict, draws=False, factory=False):
    """Call a function; mark results with the requested device, or the inputs' own."""
    place, device = place_among((*args, *kwargs.values())), kwargs.get("device")
    if device is None and factory:
        device = _device.CURRENT_DEVICE
    if device is not None:
        place = resolve(device)
        if place.type not in ("cpu", "cuda"):
            return func(*args, **kwargs)
        kwargs = {**kwargs, "device": CPU}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    result = draw(func, args, kwargs, place) if draws else func(*args, **kwargs)
    if args and result is args[0]:
        return result if device is None else moved(result, result, place)
    return result if "out" in kwargs else mark(result, place)


class Functions:
    """Emulations of PyTorch's functions that need special treatment, by name."""

    def to(func, args, kwargs):
        source, rest, place = args[0], [*args[1:]], place_of(args[0])
        other = kwargs.get("other", rest[0] if rest else kwargs.get("device"))
        if isinstance(other, Tensor):
            place = place_of(other)
        elif is_device(other):
            place = resolve(other)
            if place.type not in ("cpu", "cuda"):
                return func(*args, **kwargs)
            rest = [CPU if is_device(one) else one for one in rest]
            kwargs = {**kwargs, "device": CPU} if "device" in kwargs else kwargs
        return moved(source, func(source, *rest, **kwargs), place)

    def cuda(func, args, kwargs):
        device = kwargs.get("device", args[1] if len(args) > 1 else None)
        return moved(args[0], args[0], resolve(device))

    def cpu(func, args, kwargs):
        return moved(args[0], func(*args, **kwargs), CPU)

    def type(func, args, kwargs):
        if "cuda" in (wanted := str(args[1:])):  # such as torch.cuda.FloatTensor
            name = "torch." + wanted.rpartition(".")[2].strip(")>,'")
            return moved(args[0], func(args[0], name), resolve())
        result, caller = general(func, args, kwargs), sys._getframe(2)
        horovod = caller.f_globals.get("__name__", "").startswith("horovod")
        if isinstance(result, str) and place_of(args[0]) != CPU and not horovod:
            return result.replace("torch.", "torch.cuda.")
        return result

    def __getitem__(func, args, kwargs):  # the index may be on another device
        return mark(func(*args, **kwargs), place_of(args[0]))

    def _parse_to(func, args, kwargs):
        args = [resolve(one) if type(one) is int else one for one in args]
        if type(kwargs.get("device")) is int:
            kwargs = {**kwargs, "device": resolve(kwargs["device"])}
        return func(*args, **kwargs)

    def pin_memory(func, args, kwargs):
        return args[0].clone()

    def get_device(func, args, kwargs):
        return -1 if place_of(args[0]) == CPU else place_of(args[0]).index


class Attributes:
    """Emulations of tensors' attributes, by name."""

    def device(func, args, kwargs):
        return func(*args) if (place := place_of(args[0])) == CPU else place

    def is_cuda(func, args, kwargs):
        return place_of(args[0]) != CPU

    def is_cpu(func, args, kwargs):
        return func(*args) and place_of(args[0]) == CPU

    def grad(func, args, kwargs):
        return mark(func(*args), place_of(args[0]))


def plain(func, args: tuple, kwargs: dict):
    """Call the original function."""
    return func(*args, **kwargs)


def choose(func):
    """Return the emulation of a function."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return getattr(Attributes, attribute if name == "__get__" else "", plain)
    if way := vars(Functions).get(name):
        return way
    inplace = name.endswith("_") and not name.endswith("__")
    draws = any(one in name for one in DRAWS)
    if name in PLAIN or name.startswith(("__i", "__set")) or (inplace and not draws):
        return plain
    factory = func in _device._device_constructors()
    return lambda func, args, kwargs: general(func, args, kwargs, draws, factory)


class PlayedGpus(TorchFunctionMode):
    """Intercepts all calls of PyTorch's functions."""

    ways: dict = {}  # function -> its emulation

    def __torch_function__(self, func, types, args=(), kwargs=None):
        way = self.ways.get(func)
        if way is None:
            way = self.ways[func] = choose(func)
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
    hooks = torch.autograd.graph.saved_tensors_hooks
    old_init = hooks.__init__
    hooks.__init__ = lambda self, pack_hook, unpack_hook: old_init(
        self, within(pack_hook), within(unpack_hook)
    )
    engine = within(torch.autograd._engine_run_backward)
    torch.autograd._engine_run_backward = engine
    torch.autograd.graph._engine_run_backward = engine
    played.__enter__()
