"""Process groups: Gloo stands in for NCCL."""

import functools
import inspect
import sys

import torch
import torch.distributed as dist

from .gpus import replace

gloo_groups: set[int] = set()  # ids of the groups that the job created with Gloo
REDUCTIONS = {"all_reduce": "tensor", "all_reduce_coalesced": "tensors"}
REDUCTIONS |= {"reduce": "tensor", "reduce_scatter": "output"}
REDUCTIONS |= {"reduce_scatter_tensor": "output", "reduce_scatter_single": "output"}


class Averaged:
    """A sum over processes that becomes an average when somebody waits for it."""

    def __init__(self, work, divide):
        self.work, self.divide = work, [divide]

    def wait(self, *args):
        result = self.work.wait(*args)
        while self.divide:
            self.divide.pop()()
        return result

    def get_future(self):
        return self.work.get_future().then(lambda done: self.wait() and done.value())

    def __getattr__(self, name: str):
        return getattr(self.work, name)


def wrap(name: str, change) -> None:
    """Let `change` call a function; it is given the arguments by their names."""
    if old := getattr(dist, name, None):
        signature = inspect.signature(old)

        @functools.wraps(old)
        def call(*args, **kwargs):
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            return change(old, given.arguments)

        replace(dist, name, call)


def join(old, given: dict):
    """Call init_process_group() or new_group() for Gloo."""
    backend = str(given["backend"] or "").lower()
    if "nccl" in backend:
        given["backend"] = "gloo"
    for name in {"device_id", "pg_options"} & {*given}:
        given[name] = None
    result = old(**given)
    if "nccl" not in backend and (backend or "world_size" in given):
        gloo_groups.add(id(result or dist.group.WORLD))
    return result


def average(output: str):
    """Return a change of a reduction: AVG becomes a sum that is divided."""

    def change(old, given: dict):
        if given["op"] != dist.ReduceOp.AVG:
            return reduce(old, given)
        result, only = given[output], given.get("dst")
        size = dist.get_world_size(given["group"])

        def divide() -> None:
            if only in (None, dist.get_rank()):
                for one in result if isinstance(result, list) else [result]:
                    exact = one.is_floating_point() or one.is_complex()
                    one.div_(size, rounding_mode=None if exact else "trunc")

        work = reduce(old, {**given, "op": dist.ReduceOp.SUM})
        if given["async_op"]:
            return Averaged(work, divide)
        divide()
        return work

    return change


def reduce(old, given: dict):
    """Call a reduction; old versions of Gloo have no reduce_scatter() of a list."""
    try:
        return old(**given)
    except RuntimeError as error:
        if "not support" not in str(error) or "input_list" not in given:
            raise
    given = {**given, "input": torch.cat(given["input_list"])}
    given.pop("input_list")
    return dist.reduce_scatter_tensor(**given)


def all_to_all(old, given: dict):
    """Call all_to_all(), which old versions of Gloo have for one tensor alone."""
    try:
        return old(**given)
    except RuntimeError as error:
        if "not support" not in str(error):
            raise
    outputs, inputs = given["output_tensor_list"], given["input_tensor_list"]
    sizes = [[one.numel() for one in some] for some in (outputs, inputs)]
    received, sent = (torch.cat([x.flatten() for x in y]) for y in (outputs, inputs))
    dist.all_to_all_single(received, sent, *sizes, group=given["group"])
    for one, part in zip(outputs, received.split(sizes[0]), strict=True):
        one.copy_(part.view_as(one))
    return dist.barrier(given["group"], async_op=given["async_op"])


def install() -> None:
    """Replace functions that name a backend or a device, or that Gloo lacks."""
    if not dist.is_available():
        return
    old_backend = dist.get_backend
    mesh = sys.modules.get("torch.distributed.device_mesh")

    def get_backend(group=None) -> str:
        found, known = old_backend(group), id(group or dist.group.WORLD) in gloo_groups
        return "nccl" if found == "gloo" and not known else found

    def barrier(old, given: dict):
        return old(**{**given, "device_ids": None})

    for name, output in REDUCTIONS.items():
        wrap(name, average(output))
    for name in ("init_process_group", "new_group"):
        wrap(name, join)
    wrap("all_to_all", all_to_all)
    wrap("barrier", barrier)
    replace(dist, "get_backend", get_backend)
    replace(dist, "is_nccl_available", lambda: True)
    if mesh:
        old_init = mesh.DeviceMesh.__init__

        @functools.wraps(old_init)
        def init(self, device_type, *args, **kwargs):
            device_type = "cpu" if device_type == "cuda" else device_type
            old_init(self, device_type, *args, **kwargs)

        replace(mesh.DeviceMesh, "__init__", init)
