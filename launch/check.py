"""Check a command line once, in one process, before a launcher starts the processes.

    python -m launch.check [--nproc-per-node N] [--nnodes N] SCRIPT FLAGS

Bad flags, data or checkpoints cause a one-line error and exit status 2, instead of a
long message per process. Otherwise this program prints the total number of processes
and the compute threads of each process: `8 4`. The default is one process per GPU, or 2
on a CPU. HOSTS=a:4,b:4 in the environment lists machines and process counts.
launch/torchrun.py makes the same checks before it starts processes.
"""

import argparse
import importlib.util
import os
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

from common.checkpoint import check_checkpoint, lock_output
from common.data import build_datasets, open_folders
from common.device import check_devices, machine_cores, usable_gpus
from common.errors import UserError
from launch.agreement import check_batch
from launch.exits import exit_status
from launch.machines import check_own_address


def check(
    args: Namespace,
    processes: int,
    world_size: int | None = None,
    script: ModuleType | None = None,
) -> None:
    """Raise the errors that training would raise about flags, data or checkpoint.

    This initializes no GPU, because only the processes that the caller starts use GPUs.

    Args:
        processes: the number of processes on this machine.
        world_size: the total number; by default, `processes` times `args.nnodes`.
        script: if given, check data only if it uses common/'s build_datasets().
    """
    backend = getattr(args, "backend", "no process group")
    check_devices(args.device, processes, backend)
    world_size = world_size or processes * getattr(args, "nnodes", 1)
    check_batch(args, world_size)
    if world_size > processes:
        gpus = args.device != "cpu" and usable_gpus()
        if backend == "gloo" or (backend is None and not gpus):
            check_own_address()
    used = vars(script).values() if script else [build_datasets]
    if build_datasets in used and not args.synthetic:
        open_folders(args)
    # On several machines, rank 0 of the same run may already hold the lock
    if world_size == processes and not args.evaluate:
        lock_output(Path(args.output)).close()
    check_checkpoint(args)


def load_script(script: Path) -> ModuleType:
    """Import a script without running main(); raises UserError if it is unsuitable."""
    if not script.is_file():
        raise UserError(f"{script}: there is no such script")
    sys.argv[0] = str(script)  # error messages start with this name
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "arguments"):
        raise UserError(f"{script} has no arguments() function to parse flags")
    return module


def processes_per_machine(device: str) -> int:
    """The default number of processes on a machine: one per GPU, or 2 on a CPU."""
    return (usable_gpus() if device != "cpu" else 0) or 2


def number_of_processes(text: str, device: str) -> int:
    """Parse NPROC, where "auto" is the default; raises UserError if it is invalid."""
    if text == "auto":
        return processes_per_machine(device)
    if not text.isdecimal() or not int(text):
        raise UserError(f"NPROC={text} is not a positive whole number")
    return int(text)


def set_threads(processes: int) -> None:
    """Divide this machine's cores evenly among its processes as compute threads."""
    threads = max(1, machine_cores() // processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def parser(description: str) -> argparse.ArgumentParser:
    """Build a parser for options, a script, and the script's flags."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("--nproc-per-node", metavar="N", default="auto")
    parser.add_argument("script", type=Path)
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    return parser


def main() -> None:
    """Check the command line in sys.argv, and print the number of processes."""
    options = parser(__doc__)
    options.add_argument("--nnodes", metavar="N", type=int, default=1)
    launch = options.parse_args()
    script = load_script(launch.script)
    args = script.arguments(launch.flags)
    if hosts := os.environ.get("HOSTS"):
        slots = [host.rpartition(":")[2] for host in hosts.split(",")]
        if not all(slot.isdecimal() and int(slot) for slot in slots):
            raise UserError(f"HOSTS={hosts} is not of the form a:4,b:4")
        if launch.nproc_per_node != "auto":
            raise UserError("use either NPROC or HOSTS, which sets process counts")
        # Any entry, or none, may be this machine
        processes, world_size = min(map(int, slots)), sum(map(int, slots))
    else:
        processes = number_of_processes(launch.nproc_per_node, args.device)
        world_size = processes * launch.nnodes
    check(args, processes, world_size, script)
    set_threads(processes)
    print(world_size, os.environ["OMP_NUM_THREADS"])


if __name__ == "__main__":
    with exit_status():
        main()
