"""Emulate communication between GPUs: NCCL, SyncBatchNorm and nn.DataParallel."""

import functools
import inspect
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import comm

from .gpus import CPU, replace, resolve

COLLECTIVES = """all_reduce reduce_scatter_tensor reduce_scatter_single
    all_gather_into_tensor all_gather_single""".split()
asked_for_nccl: list[bool] = []


def wrap(name: str, change) -> None:
    """Replace a function with one that calls `change(function, {name: argument})`."""
    if old := getattr(dist, name, None):
        signature = inspect.signature(old)

        @functools.wraps(old)
        def call(*args, **kwargs):
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            return change(old, given.arguments)

        replace(dist, name, call)


def join(old, given: dict):
    """Call init_process_group() or new_group() with Gloo as the backend."""
    backend = str(given["backend"] or "").lower()
    if "nccl" in backend or ("world_size" in given and not backend):
        asked_for_nccl.append(True)
        given["backend"] = "gloo"
    return old(**{**given, **dict.fromkeys({"device_id", "pg_options"} & {*given})})


def communicate(old, given: dict):
    """Call a collective with what Gloo lacks: any shapes, as in NCCL, and averages."""
    for name in {"output_tensor", "input_tensor", "output", "input"} & {*given}:
        given[name] = given[name].contiguous().view(-1)
    if averages := given.get("op") == dist.ReduceOp.AVG:
        given["op"] = dist.ReduceOp.SUM
    work = old(**given)
    if averages:
        if work:
            work.wait()
        result = given.get("output", given.get("tensor"))
        result.copy_(result / dist.get_world_size(given["group"]))
    return work


def sync_batch_norm(
    batch, weight, bias, running_mean, running_var, eps, momentum, group, world_size
) -> Tensor:
    """Compute a batch norm over the batches of all ranks, which may differ in size."""
    from torch.distributed.nn.functional import _AllReduce  # has a gradient, no warning

    all_reduce = functools.partial(_AllReduce.apply, dist.ReduceOp.SUM, group)
    x = batch if batch.dtype == torch.float64 else batch.float()
    axes, shape = [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)]
    number = all_reduce(x.new_tensor(x.numel() / x.shape[1]))
    mean = all_reduce(x.sum(axes)) / number
    centered = x - mean.view(shape)
    var = all_reduce(centered.square().sum(axes)) / number
    if running_mean is not None:
        running_mean.lerp_(mean.detach().to(running_mean.dtype), momentum)
        unbiased = (var * number / (number - 1)).detach()
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    result = centered * (var + eps).rsqrt().view(shape)
    if weight is not None:
        result = result * weight.view(shape) + bias.view(shape)
    return result.to(batch.dtype)


class Comm:
    """Emulations of the functions of torch.cuda.comm, which nn.DataParallel calls."""

    def scatter(tensor, devices=None, chunk_sizes=None, dim=0, streams=None) -> tuple:
        parts = tensor.split(chunk_sizes, dim) if chunk_sizes else None
        parts = parts or tensor.chunk(len(devices), dim)
        return tuple(part.to(resolve(devices[i])) for i, part in enumerate(parts))

    def gather(tensors, dim=0, destination=None) -> Tensor:
        place = CPU if destination == -1 else resolve(destination)
        return torch.cat([one.to(place) for one in tensors], dim)

    def broadcast_coalesced(tensors, devices, buffer_size=0) -> list[list[Tensor]]:
        return [[one.to(resolve(device)) for one in tensors] for device in devices]

    def reduce_add_coalesced(inputs, destination=None, buffer_size=0) -> tuple:
        place = resolve(destination)
        copies = zip(*inputs, strict=True)
        return tuple(sum(one.to(place) for one in some) for some in copies)


def install() -> None:
    """Replace functions that take or return a backend or a device."""
    for name in ("scatter", "gather", "broadcast_coalesced", "reduce_add_coalesced"):
        replace(comm, name, getattr(Comm, name))
    old_backend, mesh = dist.get_backend, sys.modules["torch.distributed.device_mesh"]
    old_init = mesh.DeviceMesh.__init__

    def get_backend(group=None) -> str:
        found = old_backend(group)
        return "nccl" if found == "gloo" and asked_for_nccl else found

    def init(self, device_type, *args, **kwargs):
        old_init(self, device_type.replace("cuda", "cpu"), *args, **kwargs)

    for name in COLLECTIVES:
        wrap(name, communicate)
    for name in ("init_process_group", "new_group"):
        wrap(name, join)
    wrap("barrier", lambda old, given: old(**{**given, "device_ids": None}))
    replace(dist, "get_backend", get_backend)
    replace(dist, "is_nccl_available", lambda: True)
    replace(mesh.DeviceMesh, "__init__", init)
    by_name = SimpleNamespace(apply=sync_batch_norm)
    replace(torch.nn.modules.batchnorm, "sync_batch_norm", by_name)
