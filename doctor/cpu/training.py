"""Mixed precision, SyncBatchNorm, DataParallel, data loading and compilation."""

import functools
import os

import torch
from torch import Tensor
from torch.nn.parallel import comm
from torch.utils.data import dataloader

from . import gpus, mode
from .gpus import replace, resolve


def channels(tensor: Tensor, values: Tensor) -> Tensor:
    """Return one number per channel, shaped to broadcast over a batch of images."""
    return values.view(1, -1, *[1] * (tensor.dim() - 2))


def rows(tensor: Tensor) -> Tensor:
    """Return a batch as a matrix with a row per channel, in float32 or float64."""
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    return wide.transpose(0, 1).flatten(1)


class Kernels:
    """What PyTorch computes for SyncBatchNorm on GPUs alone, under the same names."""

    def batch_norm_stats(input, eps):
        var, mean = torch.var_mean(rows(input), 1, correction=0)
        return mean, (var + eps).rsqrt()

    def batch_norm_gather_stats_with_counts(
        input, mean, invstd, running_mean, running_var, momentum, eps, counts
    ):
        counts, means = counts.double().unsqueeze(1), mean.double()
        total = counts.sum()
        center = (means * counts).sum(0) / total
        var = invstd.double() ** -2 - eps + (means - center) ** 2
        var = (var * counts).sum(0) / total
        if running_mean is not None:
            unbiased = (var * total / (total - 1)).to(running_var.dtype)
            running_mean.lerp_(center.to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased, momentum)
        return center.to(mean.dtype), (var + eps).rsqrt().to(mean.dtype)

    def batch_norm_elemt(input, weight, bias, mean, invstd, eps):
        scale = invstd if weight is None else invstd * weight
        result = (input - channels(input, mean)) * channels(input, scale)
        result = result if bias is None else result + channels(input, bias)
        return result.to(input.dtype)

    def batch_norm_backward_reduce(grad, input, mean, invstd, weight, *needed):
        total = rows(grad).sum(1)
        with_input = (rows(grad) * (rows(input) - mean.unsqueeze(1))).sum(1)
        return total, with_input, with_input * invstd, total

    def batch_norm_backward_elemt(
        grad, input, mean, invstd, weight, sum_dy, sum_dy_xmu, count
    ):
        mean, scale = channels(input, mean), channels(input, invstd)
        along = channels(input, sum_dy_xmu / count.sum()) * scale**2
        result = grad - channels(input, sum_dy / count.sum()) - (input - mean) * along
        result = result * (scale if weight is None else scale * channels(input, weight))
        return result.to(input.dtype)


def compute(kernel, func, args: tuple, kwargs: dict):
    """Call a kernel in place of PyTorch's function, and mark its results."""
    result = kernel(*args, **kwargs)
    return mode.mark(result, mode.place_among(args))


def scatter(tensor, devices=None, chunk_sizes=None, dim=0, streams=None, *, out=None):
    """Play torch.cuda.comm.scatter()."""
    parts = tensor.split(chunk_sizes, dim) if chunk_sizes else None
    parts = parts or tensor.chunk(len(devices or out), dim)
    if out is not None:
        return tuple(one.copy_(part) for one, part in zip(out, parts, strict=True))
    return tuple(part.to(resolve(one)) for part, one in zip(parts, devices))  # noqa: B905


def gather(tensors, dim=0, destination=None, *, out=None):
    """Play torch.cuda.comm.gather()."""
    place = gpus.CPU if destination == -1 else resolve(destination)
    place = out.device if out is not None else place
    return torch.cat([one.to(place) for one in tensors], dim, out=out)


def broadcast(tensor, devices=None, *, out=None):
    """Play torch.cuda.comm.broadcast()."""
    if out is not None:
        return tuple(one.copy_(tensor) for one in out)
    return tuple(tensor.to(resolve(one)) for one in devices)


def broadcast_coalesced(tensors, devices, buffer_size=0):
    """Play torch.cuda.comm.broadcast_coalesced()."""
    return [[one.to(resolve(device)) for one in tensors] for device in devices]


def on_cpu(name: str) -> None:
    """Let a function that asks for a device's autocast use the CPU's."""
    old = getattr(torch, name, None)

    @functools.wraps(old)
    def call(*args):
        if not args or isinstance(args[0], bool):
            args = ("cuda", *args)
        return old("cpu" if args[0] == "cuda" else args[0], *args[1:])

    replace(torch, name, call)


def install() -> None:
    """Replace functions that a training loop calls."""
    old_init, old_dtype = torch.autocast.__init__, torch.get_autocast_dtype
    old_iterate = dataloader._BaseDataLoaderIter.__init__
    old_compile = torch.compile

    @functools.wraps(old_init)
    def init(self, device_type, dtype=None, enabled=True, cache_enabled=None):
        dtype = dtype or torch.get_autocast_dtype(device_type)
        if device_type == "cuda" and enabled:
            gpus.say(f"autocast({dtype}) casts the operations that it casts on CPUs")
        device_type = "cpu" if device_type == "cuda" else device_type
        old_init(self, device_type, dtype, enabled, cache_enabled)

    def get_autocast_dtype(device_type):
        played = device_type == "cuda" and torch.is_autocast_enabled("cpu")
        return old_dtype("cpu" if played else device_type)

    def iterate(self, loader):
        old_iterate(self, loader)
        self._pin_memory = False

    @functools.wraps(old_compile)
    def compile(*args, **kwargs):
        gpus.say("torch.compile() compiles nothing: the code runs as it is written")
        return old_compile(*args, **kwargs)

    for name, kernel in vars(Kernels).items():
        if name.startswith("batch_norm"):
            mode.KERNELS[name] = functools.partial(compute, kernel)
    for name in ("is_autocast_enabled", "set_autocast_enabled"):
        on_cpu(name)
    for owner, name, new in (
        (torch.autocast, "__init__", init),
        (torch, "get_autocast_dtype", get_autocast_dtype),
        (torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cuda")),
        (dataloader._BaseDataLoaderIter, "__init__", iterate),
        (torch, "compile", compile),
        (comm, "scatter", scatter),
        (comm, "gather", gather),
        (comm, "broadcast", broadcast),
        (comm, "broadcast_coalesced", broadcast_coalesced),
    ):
        replace(owner, name, new)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
