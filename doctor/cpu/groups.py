"""Emulate NCCL's process groups with Gloo."""

import functools
import inspect
import sys

import torch.distributed as dist

from .gpus import replace

REDUCTIONS = "all_reduce", "reduce_scatter_tensor", "reduce_scatter_single"
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


def flat(old, given: dict):
    """Call a collective with flattened tensors, because NCCL does not check shapes."""
    for name in {"output_tensor", "input_tensor", "output", "input"} & {*given}:
        given[name] = given[name].contiguous().view(-1)
    return old(**given)


def reduce(old, given: dict):
    """Call a reduction; for AVG, let Gloo sum the tensors, and divide the sum."""
    averages = given["op"] == dist.ReduceOp.AVG
    result = given["output" if "input" in given else "tensor"]
    given["op"] = dist.ReduceOp.SUM if averages else given["op"]
    work = flat(old, given) if "input" in given else old(**given)
    if averages:
        if work:
            work.wait()
        exact = result.is_floating_point() or result.is_complex()
        size = dist.get_world_size(given["group"])
        result.div_(size, rounding_mode=None if exact else "trunc")
    return work


def install() -> None:
    """Replace functions that take or return a backend or a device."""
    if not dist.is_available():
        return
    old_backend, mesh = dist.get_backend, sys.modules["torch.distributed.device_mesh"]
    old_init = mesh.DeviceMesh.__init__

    def get_backend(group=None) -> str:
        found = old_backend(group)
        return "nccl" if found == "gloo" and asked_for_nccl else found

    @functools.wraps(old_init)
    def init(self, device_type, *args, **kwargs):
        device_type = "cpu" if device_type == "cuda" else device_type
        old_init(self, device_type, *args, **kwargs)

    for name in REDUCTIONS:
        wrap(name, reduce)
    for name in ("all_gather_into_tensor", "all_gather_single"):
        wrap(name, flat)
    for name in ("init_process_group", "new_group"):
        wrap(name, join)
    wrap("barrier", lambda old, given: old(**{**given, "device_ids": None}))
    replace(dist, "get_backend", get_backend)
    replace(dist, "is_nccl_available", lambda: True)
    replace(mesh.DeviceMesh, "__init__", init)
