"""The device a process computes on, and what it can do."""

import glob
import sys
from argparse import Namespace

import torch

from common.errors import UserError

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def select_device(
    name: str, local_rank: int = 0, backend: str | None = None
) -> torch.device:
    """Choose this process's device and make it the current one.

    Args:
        name: "cpu", "cuda", or "auto" for a GPU where PyTorch can use one.
        local_rank: the GPU's number.
        backend: with "gloo", processes beyond the number of GPUs share them.

    Raises:
        UserError: a GPU was asked for and cannot be used, or there are too few.
    """
    check_devices(name, local_rank + 1, backend)
    if name == "cpu" or not torch.cuda.is_available():
        problem = gpu_problem()
        if name == "auto" and problem and local_rank == 0:
            print(
                f"warning: {problem}; training on the CPU", file=sys.stderr, flush=True
            )
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    # All batches have one size, so the search for the fastest convolution pays off
    torch.backends.cudnn.benchmark = True
    return device


def usable_gpus() -> int:
    """GPUs that PyTorch can use; device_count alone also counts those it cannot."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_and_backend(args: Namespace) -> str:
    """What this machine's processes will compute on and talk over, as "cuda:nccl"."""
    device = "cuda" if args.device != "cpu" and usable_gpus() else "cpu"
    backend = getattr(args, "backend", None)
    return f"{device}:{backend or ('nccl' if device == 'cuda' else 'gloo')}"


def check_devices(name: str, processes: int, backend: str | None) -> None:
    """See that the GPUs are there for this many processes; none of them is touched.

    Raises:
        UserError: a GPU was asked for and cannot be used, or there are too few.
    """
    gpus = 0 if name == "cpu" else usable_gpus()
    problem = gpu_problem() or "this machine shows no CUDA GPU"
    if name == "cuda" and not gpus:
        raise UserError(f"--device cuda: {problem}")
    if backend == "nccl" and not gpus:
        problem = "it does not go with --device cpu" if name == "cpu" else problem
        raise UserError(f"--backend nccl: {problem}")
    if 0 < gpus < processes and backend != "gloo":
        error = UserError(
            f"{processes} processes for {gpus} GPUs: start one process per GPU "
            "(--backend gloo lets processes share one)"
        )
        error.one_process_only = True  # the first ones have their GPU
        raise error


def gpu_problem() -> str | None:
    """Say why a GPU that is present cannot be used; None where there is none."""
    if torch.cuda.is_available() or not glob.glob("/dev/nvidia[0-9]*"):
        return None
    if torch.version.cuda is None:
        return (
            f"a GPU is present, but PyTorch {torch.__version__} is built without CUDA"
        )
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return (
            f"a GPU is present, but PyTorch cannot use it: {str(error).splitlines()[0]}"
        )
    return "a GPU is present, but CUDA_VISIBLE_DEVICES hides it"


def require_gpu(name: str, who: str) -> None:
    """See that there is a GPU to use.

    Args:
        name: the --device that was asked for.
        who: what needs the GPU.

    Raises:
        UserError: there is none, or --device cpu forbids it.
    """
    if name == "cpu" or not torch.cuda.is_available():
        problem = gpu_problem() if name != "cpu" else "--device cpu forbids it"
        raise UserError(f"{who} needs a CUDA GPU: {problem or 'this machine has none'}")


def has_bf16(device: torch.device) -> bool:
    """Whether the device computes in bfloat16 itself instead of emulating it."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return any(
        capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16")
    )


def describe(device: torch.device) -> str:
    """Name the device as its maker does."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.cpu.get_capabilities().get("cpu_name") or "CPU"


def peak_memory_mib(device: torch.device) -> float:
    """Most memory used so far, in MiB: PyTorch's on the GPU, or this process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def best_precision(device: torch.device) -> str:
    """The precision when none was asked for: bf16 where the device has it."""
    return "bf16" if has_bf16(device) else "fp32"


def processes_per_machine(device: str) -> int:
    """Training processes of a machine by default: one per GPU, 2 on a CPU."""
    return (usable_gpus() if device != "cpu" else 0) or 2


def autocast_dtype(precision: str) -> torch.dtype:
    """What torch.autocast computes in; float32, off, for another library's name."""
    return PRECISIONS.get(precision, torch.float32)
