"""Emulate mixed precision, SyncBatchNorm, DataParallel, loaders and compilation."""

import functools
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import comm
from torch.utils.data import dataloader

from . import gpus
from .gpus import replace, resolve


class AllReduce(torch.autograd.Function):
    """A sum over all ranks, whose gradient is also summed over all ranks."""

    def forward(ctx, tensor, group):
        ctx.group, result = group, tensor.clone()
        dist.all_reduce(result, group=group)
        return result

    def backward(ctx, gradient):
        return AllReduce.apply(gradient, ctx.group), None


def sync_batch_norm(
    batch, weight, bias, running_mean, running_var, eps, momentum, group, world_size
) -> Tensor:
    """Compute a batch norm over the batches of all ranks, which may differ in size."""
    x = batch if batch.dtype == torch.float64 else batch.float()
    rows = x.transpose(0, 1).flatten(1)  # one row per channel
    number = rows.new_full([1], rows.shape[1])
    sums = AllReduce.apply(torch.cat([rows.sum(1), number]), group)
    number, mean = sums[-1].detach(), sums[:-1] / sums[-1].detach()
    squares = (rows - mean.unsqueeze(1)).square().sum(1)
    var = AllReduce.apply(squares, group) / number
    if running_mean is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            unbiased = (var * number / (number - 1)).to(running_var.dtype)
            running_var.lerp_(unbiased, momentum)
    scale = (var + eps).rsqrt() if weight is None else (var + eps).rsqrt() * weight
    offset = -mean * scale if bias is None else bias - mean * scale
    shape = 1, -1, *[1] * (batch.dim() - 2)
    return (x * scale.view(shape) + offset.view(shape)).to(batch.dtype)


def scatter(tensor, devices=None, chunk_sizes=None, dim=0, streams=None) -> tuple:
    """Emulate torch.cuda.comm.scatter()."""
    parts = tensor.split(chunk_sizes, dim) if chunk_sizes else None
    parts = parts or tensor.chunk(len(devices), dim)
    return tuple(part.to(resolve(devices[i])) for i, part in enumerate(parts))


def gather(tensors, dim=0, destination=None) -> Tensor:
    """Emulate torch.cuda.comm.gather()."""
    place = gpus.CPU if destination == -1 else resolve(destination)
    return torch.cat([one.to(place) for one in tensors], dim)


def broadcast_coalesced(tensors, devices, buffer_size=0) -> list[list[Tensor]]:
    """Emulate torch.cuda.comm.broadcast_coalesced()."""
    return [[one.to(resolve(device)) for one in tensors] for device in devices]


def reduce_add_coalesced(inputs, destination=None, buffer_size=0) -> tuple:
    """Emulate torch.cuda.comm.reduce_add_coalesced()."""
    moved = [[one.to(resolve(destination)) for one in some] for some in inputs]
    return tuple(functools.reduce(Tensor.add, one) for one in zip(*moved, strict=True))


def install() -> None:
    """Replace the functions that training loops call."""
    old_init, old_dtype = torch.autocast.__init__, torch.get_autocast_dtype
    old_iterate = dataloader._BaseDataLoaderIter.__init__
    old_compile, old_enabled = torch.compile, torch.is_autocast_enabled

    @functools.wraps(old_init)
    def init(self, device_type, dtype=None, enabled=True, cache_enabled=None):
        dtype = dtype or torch.get_autocast_dtype(device_type)
        if device_type == "cuda" and enabled:
            gpus.say(f"autocast({dtype}) casts the same operations as CPU autocast")
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

    for new in (scatter, gather, broadcast_coalesced, reduce_add_coalesced):
        replace(comm, new.__name__, new)
    for new in (is_autocast_enabled, get_autocast_dtype, compile):
        replace(torch, new.__name__, new)
    replace(torch, "get_autocast_gpu_dtype", lambda: get_autocast_dtype("cuda"))
    replace(torch.autocast, "__init__", init)
    by_name = SimpleNamespace(apply=sync_batch_norm)
    replace(torch.nn.modules.batchnorm, "sync_batch_norm", by_name)
    replace(dataloader._BaseDataLoaderIter, "__init__", iterate)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
