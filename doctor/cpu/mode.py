"""The mode that PyTorch asks before it runs a function: devices, moves and marks."""

import sys
import threading

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _device

from . import gpus
from .gpus import CPU, place_of, put, resolve

# Functions that return no tensor, or one that shares its storage with the first
PLAIN = set(
    """size dim numel stride is_contiguous untyped_storage item tolist numpy
    backward register_hook detach view data_ptr requires_grad_ set_ share_memory_
    is_floating_point is_complex element_size storage _typed_storage __len__ __format__
    __repr__ __bool__ __float__ __int__ __index__ __reduce_ex__ __hash__ __contains__
    """.split()
)
DRAWS = """rand normal uniform dropout bernoulli multinomial exponential poisson cauchy
    geometric rrelu gumbel fractional_max_pool multi_head_attention lstm gru rnn_tanh
    rnn_relu scaled_dot_product""".split()
SHORT = {"Half": torch.float16, "BFloat16": torch.bfloat16}
drawing = threading.Lock()


def is_device(value: object) -> bool:
    """Return whether an argument of .to() names a device."""
    known = isinstance(value, (str, int, torch.device))
    return known and not isinstance(value, bool)


def moved(source: Tensor, result: Tensor, place: torch.device) -> Tensor:
    """Return the result of a move to a place; if nothing was copied, copy it."""
    if place == place_of(result):
        return result
    if result is source:
        result = source.clone()
    return result if place == CPU else put(result, place)


def mark(result, place: torch.device):
    """Mark the tensors in a function's result, and return it."""
    if isinstance(result, Tensor):
        put(result, place)
    elif isinstance(result, (tuple, list)):
        for one in result:
            mark(one, place)
    return result


def place_among(values) -> torch.device:
    """Return the first GPU that holds a tensor of nested lists; else the CPU."""
    for value in values:
        found = CPU
        if isinstance(value, Tensor):
            found = place_of(value)
        elif isinstance(value, (tuple, list)) and value:
            if not isinstance(value[0], (int, float)):
                found = place_among(value)
        if found != CPU:
            return found
    return CPU


def shared(result, values) -> bool:
    """Return whether a result lies in the memory of an argument on the CPU."""
    tensors = [x for x in values if isinstance(x, Tensor) and place_of(x) == CPU]
    known = {one.data_ptr() for one in tensors if one.layout == torch.strided}
    return isinstance(result, Tensor) and result.data_ptr() in known


def compute(func, args: tuple, kwargs: dict):
    """Call a function; in float32, if the CPU cannot compute it in 16 bits."""
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        names = [x for x in SHORT if f"not implemented for '{x}'" in str(error)]
        if not names:
            raise
    dtype = SHORT[names[0]]

    def longer(x):
        return x.float() if isinstance(x, Tensor) and x.dtype == dtype else x

    args = [[*map(longer, x)] if isinstance(x, list) else longer(x) for x in args]
    result = func(*args, **{name: longer(x) for name, x in kwargs.items()})
    return result.to(dtype) if isinstance(result, Tensor) else result


def draw(func, args: tuple, kwargs: dict, place: torch.device):
    """Call a function that may draw random numbers, from the place's generator."""
    if place == CPU or kwargs.get("generator") is not None:
        return compute(func, args, kwargs)
    default, gpu = torch.random.default_generator, gpus.generator(place)
    with drawing:
        before = default.get_state()
        default.set_state(gpu.get_state())
        try:
            return compute(func, args, kwargs)
        finally:
            gpu.set_state(default.get_state())
            default.set_state(before)


def general(func, args: tuple, kwargs: dict, draws=False, factory=False, inplace=False):
    """Call a function; its results are on the device asked for, or on its tensors'."""
    place = place_among((*args, *kwargs.values()))
    device = kwargs.get("device")
    if device is None and factory:
        device = _device.CURRENT_DEVICE
    if device is not None:
        asked = resolve(device)
        if asked.type not in ("cpu", "cuda"):
            return func(*args, **kwargs)
        place, kwargs = asked, {**kwargs, "device": CPU}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    result = draw(func, args, kwargs, place) if draws else compute(func, args, kwargs)
    if place == CPU or inplace or result is kwargs.get("out", CPU):
        return result
    from_cpu = args and isinstance(args[0], Tensor) and place_of(args[0]) == CPU
    return result if from_cpu and shared(result, args) else mark(result, place)


def plain(func, args: tuple, kwargs: dict):
    """Call a function as it is."""
    return func(*args, **kwargs)


class Functions:
    """Functions of PyTorch that are played in a way of their own, by their names."""

    def to(func, args, kwargs):
        source, rest, place = args[0], [*args[1:]], None
        other = kwargs.get("other", rest[0] if rest else kwargs.get("device"))
        if isinstance(other, Tensor):
            place = place_of(other)
        elif is_device(other):
            place = resolve(other)
            if place.type not in ("cpu", "cuda"):
                return func(*args, **kwargs)
            rest = [CPU if is_device(one) else one for one in rest]
            kwargs = {**kwargs, "device": CPU} if "device" in kwargs else kwargs
        place = place_of(source) if place is None else place
        return moved(source, func(source, *rest, **kwargs), place)

    def cuda(func, args, kwargs):
        device = kwargs.get("device", args[1] if len(args) > 1 else None)
        return moved(args[0], args[0], resolve(device))

    def cpu(func, args, kwargs):
        return moved(args[0], func(*args, **kwargs), CPU)

    def type(func, args, kwargs):
        source, place = args[0], place_of(args[0])
        wanted = kwargs.get("dtype", args[1] if len(args) > 1 else None)
        if wanted is None:  # Horovod has functions with these names
            caller = sys._getframe(2).f_globals.get("__name__", "")
            played = place != CPU and not caller.startswith("horovod")
            return func(source).replace("torch.", "torch.cuda." if played else "torch.")
        if not isinstance(wanted, torch.dtype):
            wanted = gpus.name_of_type(wanted)
            place = resolve(None) if ".cuda." in wanted else CPU
            wanted = wanted.replace(".cuda", "")
        return moved(source, func(source, wanted), place)

    def type_as(func, args, kwargs):
        return moved(args[0], func(*args, **kwargs), place_of(args[1]))

    def as_tensor(func, args, kwargs):
        source, device = place_among(args), kwargs.get("device")
        device = _device.CURRENT_DEVICE if device is None else device
        place = source if device is None else resolve(device)
        if place.type not in ("cpu", "cuda"):
            return func(*args, **kwargs)
        result = func(*args, **{**kwargs, "device": CPU})
        return result if place == source else mark(result.clone(), place)

    asarray = as_tensor

    def __getitem__(func, args, kwargs):  # the index may be on another device
        result, place = compute(func, args, kwargs), place_of(args[0])
        return result if place == CPU else mark(result, place)

    def _parse_to(func, args, kwargs):
        first = [resolve(x) if type(x) is int else x for x in args[:1]]
        if type(kwargs.get("device")) is int:
            kwargs = {**kwargs, "device": resolve(kwargs["device"])}
        return func(*first, *args[1:], **kwargs)

    def pin_memory(func, args, kwargs):
        result = args[0] if Functions.is_pinned(func, args, {}) else args[0].clone()
        result.untyped_storage().pinned = True
        return result

    def is_pinned(func, args, kwargs):
        return getattr(args[0].untyped_storage(), "pinned", False)

    def record_stream(func, args, kwargs): ...

    def get_device(func, args, kwargs):
        place = place_of(args[0])
        return -1 if place == CPU else place.index

    def scaled_dot_product_attention(func, args, kwargs):
        try:
            return general(func, args, kwargs, draws=True)
        except RuntimeError as error:  # the job may allow kernels of GPUs alone
            if "vailable kernel" not in str(error):
                raise
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return general(func, args, kwargs, draws=True)


class Attributes:
    """Attributes of tensors that are played."""

    def device(func, args, kwargs):
        place = place_of(args[0])
        return func(*args) if place == CPU else place

    def is_cuda(func, args, kwargs):
        return place_of(args[0]) != CPU

    def is_cpu(func, args, kwargs):
        return func(*args) and place_of(args[0]) == CPU

    def grad(func, args, kwargs):
        found, place = func(*args), place_of(args[0])
        return found if found is None or place == CPU else put(found, place)


KERNELS: dict = {}  # by name: functions that PyTorch has for GPUs alone


def choose(func):
    """Return how a function is played."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return getattr(Attributes, attribute if name == "__get__" else "", plain)
    if name in PLAIN:
        return plain
    if way := KERNELS.get(name) or vars(Functions).get(name):
        return way
    draws = any(one in name for one in DRAWS)
    inplace = name.endswith("_") and not name.endswith("__")
    inplace = inplace or name.startswith(("__i", "__set"))
    if inplace and not draws:
        return plain
    factory = func in _device._device_constructors()
    return lambda *call: general(*call, draws, factory, inplace)


class PlayedGpus(TorchFunctionMode):
    """Intercepts the calls of PyTorch's functions."""

    ways: dict = {}  # by function: how it is played

    def __torch_function__(self, func, types, args=(), kwargs=None):
        way = self.ways.get(func)
        if way is None:
            way = self.ways[func] = choose(func)
        return way(func, args, kwargs or {})


played = PlayedGpus()


def within(call):
    """Return a function that runs in the mode, whether its caller does or not."""

    def wrapped(*args, **kwargs):
        if played in _get_current_function_mode_stack():
            return call(*args, **kwargs)
        with played:
            return call(*args, **kwargs)

    return wrapped


def install() -> None:
    """Enter the mode in this thread, in later ones and in backward passes."""
    # Each thread begins here, also one whose class has a run() of its own
    threading.Thread._bootstrap_inner = within(threading.Thread._bootstrap_inner)
    engine = within(torch.autograd._engine_run_backward)
    torch.autograd._engine_run_backward = engine
    torch.autograd.graph._engine_run_backward = engine
    played.__enter__()
