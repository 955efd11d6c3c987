"""The device that a process computes on, and its capabilities."""

import glob
import math
import os
import resource
import sys
from pathlib import Path

import torch

from common.errors import UserError

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def select_device(
    name: str, local_rank: int = 0, backend: str | None = None
) -> torch.device:
    """Choose this process's device and make it current; raises UserError if unusable.

    Args:
        name: "cpu", "cuda", or "auto" for a GPU if PyTorch can use one.
        local_rank: the index of this process's GPU.
        backend: with "gloo", several processes can share a GPU.
    """
    check_devices(name, local_rank + 1, backend)
    if name == "cpu" or not torch.cuda.is_available():
        problem = gpu_problem()
        if name == "auto" and problem and local_rank == 0:
            print(f"warning: {problem}; training on the CPU", file=sys.stderr)
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    # All batches have the same shape, so benchmarking convolutions once pays off
    torch.backends.cudnn.benchmark = True
    return device


def usable_gpus() -> int:
    """The number of GPUs that PyTorch can use; device_count() may be higher."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_devices(name: str, processes: int, backend: str | None) -> None:
    """Raise a UserError if there are too few GPUs; this does not initialize any."""
    gpus = 0 if name == "cpu" else usable_gpus()
    problem = gpu_problem() or "this machine has no CUDA GPU"
    if name == "cuda" and not gpus:
        raise UserError(f"--device cuda: {problem}")
    if backend == "nccl" and not gpus:
        problem = "it does not work with --device cpu" if name == "cpu" else problem
        raise UserError(f"--backend nccl: {problem}")
    if 0 < gpus < processes and backend != "gloo":
        error = UserError(
            f"{processes} processes for {gpus} GPUs: start one process per GPU "
            "(--backend gloo lets processes share a GPU)"
        )
        error.one_process_only = True  # the first processes have a GPU
        raise error


def gpu_problem() -> str | None:
    """Say why PyTorch cannot use a GPU; None if it can, or if there is none."""
    if torch.cuda.is_available() or not glob.glob("/dev/nvidia[0-9]*"):
        return None
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        problem = str(error).splitlines()[0]
        return f"a GPU is present, but PyTorch cannot use it: {problem}"
    return "a GPU is present, but CUDA_VISIBLE_DEVICES hides it"


def require_gpu(name: str, who: str) -> None:
    """Raise a UserError if `who` (a flag or library) cannot get a GPU with --device."""
    if name == "cpu" or not torch.cuda.is_available():
        problem = gpu_problem() if name != "cpu" else "--device cpu excludes it"
        raise UserError(f"{who} needs a CUDA GPU: {problem or 'this machine has none'}")


def describe(device: torch.device) -> str:
    """The device's product name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.cpu.get_capabilities().get("cpu_name") or "CPU"


def peak_memory_mib(device: torch.device) -> float:
    """Peak memory in MiB: PyTorch's on the GPU, or this process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def best_precision(device: torch.device) -> str:
    """bf16 if the device supports it without emulation, otherwise fp32."""
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        able = torch.cpu.get_capabilities()
        native = any(able.get(n) for n in ("avx512_bf16", "amx_bf16", "bf16"))
    return "bf16" if native else "fp32"


def autocast_dtype(precision: str) -> torch.dtype:
    """The dtype for torch.autocast; float32 (no autocast) for Apex's opt levels."""
    return PRECISIONS.get(precision, torch.float32)


def machine_cores(root: Path = Path("/")) -> int:
    """The number of this machine's cores that the job may use, at least 1.

    `root` contains sys/fs/cgroup, which has a container's CPU quota
    (https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files).
    """
    # srun may bind each task to its own share of the job's cores
    slurm = os.environ.get("SLURM_CPUS_ON_NODE", "")
    cores = int(slurm) if slurm.isdecimal() else len(os.sched_getaffinity(0))
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
    except OSError:
        return cores
    if quota != "max":
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)
