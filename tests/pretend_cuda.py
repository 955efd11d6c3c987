"""Run a script's CUDA lines on a machine without GPUs, and record the calls.

A tensor on a simulated GPU is a CPU tensor in PLACES. As with CUDA, it is an error to mix devices,
to send CPU tensors over NCCL, and to use CUDA in a forked process. CPU kernels compute, Gloo
communicates, and nn.DataParallel's replicas take turns in one thread. The simulation cannot test
CUDA, cuDNN, NCCL, streams, pinned memory, speed, or calls in backward().
"""

import json
import os
import runpy
import sys

import torch
import torch.distributed as dist
from played import spawn
from torch import Tensor, autocast, backends, cuda, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

CPU, PLACES = torch.device("cpu"), torch.utils.weak.WeakTensorKeyDictionary()
MIXED = {"to", "copy_", "__set__", "_has_compatible_shallow_copy_type"}  # two devices
WAITS = {"cpu", "item", "tolist", "numpy", "nonzero", "__bool__", "__float__"}


class SimulatedGpus(TorchFunctionMode):
    """Intercepts all calls to PyTorch's functions while the mode is active."""

    def __init__(self, count: int, folder: str):
        self.count, self.folder, self.now, self.user = count, folder, 0, None
        self.total_memory = self.multi_processor_count = 1

    def note(self, name: str, *args, **kwargs) -> None:
        call = [name, args, kwargs, backends.cudnn.benchmark]
        with open(f"{self.folder}/{os.getpid()}.calls", "a") as file:
            print(json.dumps(call, default=str), file=file)

    def replace(self, owner, name: str, call) -> None:
        def noting(*args, **kwargs):
            label, first = (owner.__name__, 1) if name == "__init__" else (name, 0)
            self.note(label, *args[first:], **kwargs)
            return call(*args, **kwargs)

        setattr(owner, name, noting)

    def gpu(self, device: torch.device) -> torch.device:
        """Return a device with its index; raise an error in a process forked after CUDA was used."""
        self.user = self.user or os.getpid()
        index = self.now if device.index is None else device.index
        if self.user != os.getpid() or index >= self.count:
            raise RuntimeError(f"CUDA error: no {device} in process {os.getpid()}")
        return torch.device("cuda", index)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs, leaves = func.__name__, kwargs or {}, tree_leaves((args, kwargs))
        asked = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
        asked += [CPU for leaf in leaves if isinstance(leaf, str) and leaf == "cpu"]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if func == Tensor.device.__get__:
            return PLACES.get(args[0], CPU)
        if not tensors and (not asked or name == "_parse_to"):
            return func(*args, **kwargs)
        # A single number may be on the CPU
        found = {PLACES.get(t, CPU) for t in tensors if t.dim() or t in PLACES} or {CPU}
        before = max(found, key=str)
        refused = name in ("all_reduce", "broadcast") and before == CPU
        if refused or (len(found) > 1 and name not in MIXED):
            raise RuntimeError(f"{name} does not take tensors on {found}")
        place = asked[0] if asked else CPU if name == "cpu" else before
        place = self.gpu(place) if place.type == "cuda" else CPU
        if (name in WAITS and before != CPU) or "non_blocking" in kwargs:
            self.note(name, place, **kwargs)
        elif name == "to" and place == CPU != before:
            self.note("cpu", place)
        on_cpu = [CPU if isinstance(one, torch.device) else one for one in args]
        kwargs = {**kwargs, "device": CPU} if kwargs.get("device") else kwargs
        result = func(*on_cpu, **kwargs)
        if place != before and any(result is one for one in tensors):
            result = result.clone()  # a tensor on another device is a new one
        for leaf in tree_leaves(args[:1] if name == "__set__" else result):
            if isinstance(leaf, Tensor) and place != CPU:
                PLACES[leaf] = place
        return result

    def install(self) -> None:
        """Replace functions that need a GPU; record the calls to these and to some other functions."""
        replace, load = self.replace, DataLoader.__init__
        join, cast = dist.init_process_group, autocast.__init__
        wrappers = DDP, nn.DataParallel
        replace(cuda, "is_available", lambda: True)
        replace(cuda, "device_count", lambda: self.count)
        replace(cuda, "get_device_properties", lambda gpu: self)
        replace(cuda, "get_device_name", lambda device: "simulated GPU")
        replace(cuda, "set_device", lambda d: setattr(self, "now", self.gpu(d).index))
        replace(cuda, "is_initialized", lambda: self.user == os.getpid())
        replace(cuda, "is_current_stream_capturing", lambda: False)
        replace(cuda, "is_bf16_supported", lambda including_emulation: True)
        replace(cuda, "max_memory_allocated", lambda device: 7 * 2**20)
        replace(cuda, "manual_seed_all", lambda seed: None)
        replace(torch, "set_float32_matmul_precision", lambda precision: None)
        replace(nn.SyncBatchNorm, "convert_sync_batchnorm", lambda model: model)
        replace(dist, "init_process_group", lambda _, device_id, **k: join("gloo", **k))
        replace(DataLoader, "__init__", lambda *a, pin_memory, **k: load(*a, **k))
        replace(autocast, "__init__", lambda a, _, *b, **k: cast(a, "cpu", *b, **k))
        for one in (torch.amp.GradScaler, *wrappers):
            replace(one, "__init__", one.__init__)
        nn.DataParallel.forward = data_parallel
        before = nn.modules.module.register_module_forward_pre_hook

        def forward(module, _):
            if isinstance(module, wrappers):
                self.note("forward", getattr(module, "broadcast_buffers", None))

        before(forward)
        self.__enter__()


def data_parallel(wrapped: nn.DataParallel, images: Tensor) -> Tensor:
    module, gpus, outputs = wrapped.module, wrapped.device_ids, []
    for gpu, part in zip(gpus, images.chunk(len(gpus)), strict=False):
        device, weights = torch.device("cuda", gpu), module.state_dict(keep_vars=True)
        replica = {name: weight.to(device) for name, weight in weights.items()}
        outputs.append(torch.func.functional_call(module, replica, part.to(device)))
    return torch.cat([output.to(images.device) for output in outputs])


def run(gpus: int, folder: str, script: str, flags: list) -> None:
    sys.argv = [script, *map(str, flags)]
    torch.multiprocessing.spawn = spawn  # forks keep these replacements
    if gpus:  # otherwise the script runs on the CPU
        SimulatedGpus(gpus, folder).install()
    runpy.run_path(script, run_name="__main__")
