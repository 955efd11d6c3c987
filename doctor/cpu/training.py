"""Mixed precision, SyncBatchNorm, DataParallel, data loading and compilation."""

import functools
import os

import torch
from torch import Tensor
from torch.nn.parallel import comm
from torch.utils.data import dataloader

from . import gpus, mode
from .gpus import replace, resolve


def rows(tensor: Tensor) -> Tensor:
    """Return a batch as a matrix with a row per channel, in float32 or float64."""
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    return wide.transpose(0, 1).flatten(1)


def like(batch: Tensor, values: Tensor | float | None) -> Tensor | float:
    """Return one number per channel, in a shape to multiply a batch with; None as 1."""
    if not isinstance(values, Tensor):
        return 1.0 if values is None else values
    return values.view(1, -1, *[1] * (batch.dim() - 2))


class Kernels:
    """What PyTorch computes for SyncBatchNorm on GPUs alone, under the same names."""

    def batch_norm_stats(input, eps):
        var, mean = torch.var_mean(rows(input), 1, correction=0)
        return mean, (var + eps).rsqrt()

    def batch_norm_gather_stats_with_counts(
        input, mean, invstd, running_mean, running_var, momentum, eps, counts
    ):
        shares = (counts.double() / (total := counts.sum().item())).unsqueeze(1)
        center = (mean.double() * shares).sum(0)
        var = invstd.double() ** -2 - eps + (mean.double() - center) ** 2
        var = (var * shares).sum(0)
        if running_mean is not None:
            running_mean.lerp_(center.to(running_mean.dtype), momentum)
            unbiased = (var * total / (total - 1)).to(running_var.dtype)
            running_var.lerp_(unbiased, momentum)
        return center.to(mean.dtype), (var + eps).rsqrt().to(mean.dtype)

    def batch_norm_elemt(input, weight, bias, mean, invstd, eps):
        result = (input - like(input, mean)) * like(input, invstd) * like(input, weight)
        return (result + like(input, 0.0 if bias is None else bias)).to(input.dtype)

    def batch_norm_backward_reduce(grad, input, mean, invstd, weight, *needed):
        total = rows(grad).sum(1)
        with_input = (rows(grad) * (rows(input) - mean.unsqueeze(1))).sum(1)
        return total, with_input, with_input * invstd, total

    def batch_norm_backward_elemt(grad, input, mean, invstd, weight, dy, dy_xmu, count):
        along = like(input, dy_xmu / count.sum() * invstd**2)
        result = grad - like(input, dy / count.sum())
        result = result - (input - like(input, mean)) * along
        return (result * like(input, invstd) * like(input, weight)).to(input.dtype)


def scatter(tensor, devices=None, chunk_sizes=None, dim=0, streams=None) -> tuple:
    """Play torch.cuda.comm.scatter()."""
    parts = tensor.split(chunk_sizes, dim) if chunk_sizes else None
    parts = parts or tensor.chunk(len(devices), dim)
    return tuple(part.to(resolve(devices[i])) for i, part in enumerate(parts))


def gather(tensors, dim=0, destination=None) -> Tensor:
    """Play torch.cuda.comm.gather()."""
    place = gpus.CPU if destination == -1 else resolve(destination)
    return torch.cat([one.to(place) for one in tensors], dim)


def copies(tensors, devices, buffer_size=0) -> list[list[Tensor]]:
    """Play torch.cuda.comm.broadcast_coalesced()."""
    return [[one.to(resolve(device)) for one in tensors] for device in devices]


def sums(inputs, destination=None, buffer_size=0) -> tuple:
    """Play torch.cuda.comm.reduce_add_coalesced()."""
    moved = [[one.to(resolve(destination)) for one in some] for some in inputs]
    return tuple(functools.reduce(Tensor.add, one) for one in zip(*moved, strict=True))


def install() -> None:
    """Replace functions that a training loop calls."""
    old_init, old_dtype = torch.autocast.__init__, torch.get_autocast_dtype
    old_iterate = dataloader._BaseDataLoaderIter.__init__
    old_compile, old_enabled = torch.compile, torch.is_autocast_enabled

    @functools.wraps(old_init)
    def init(self, device_type, dtype=None, enabled=True, cache_enabled=None):
        dtype = dtype or torch.get_autocast_dtype(device_type)
        if device_type == "cuda" and enabled:
            gpus.say(f"autocast({dtype}) casts the operations that it casts on CPUs")
        device_type = "cpu" if device_type == "cuda" else device_type
        old_init(self, device_type, dtype, enabled, cache_enabled)

    def is_autocast_enabled(device_type="cuda"):
        return old_enabled("cpu" if device_type == "cuda" else device_type)

    def get_autocast_dtype(device_type):
        played = device_type == "cuda" and old_enabled("cpu")
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
            mode.KERNELS[name] = kernel
    for name, new in (
        ("scatter", scatter),
        ("gather", gather),
        ("broadcast_coalesced", copies),
        ("reduce_add_coalesced", sums),
        ("broadcast", lambda tensor, devices: [tensor.to(resolve(d)) for d in devices]),
        ("reduce_add", lambda inputs, destination=None: sums([inputs], destination)[0]),
    ):
        replace(comm, name, new)
    for new in (is_autocast_enabled, get_autocast_dtype, compile):
        replace(torch, new.__name__, new)
    replace(torch, "get_autocast_gpu_dtype", lambda: get_autocast_dtype("cuda"))
    replace(torch.autocast, "__init__", init)
    replace(dataloader._BaseDataLoaderIter, "__init__", iterate)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
