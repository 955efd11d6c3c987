"""Look at a command line once, in one process, before a launcher starts the others.

    python -m launch.check SCRIPT [PROCESSES] -- FLAGS
    python -m launch.check SCRIPT [PROCESSES] MODULE [OPTIONS] -- FLAGS

PROCESSES is their number on this machine, by default one per GPU, or 2 on a CPU. The
first form prints the number on all machines; the second goes on as `python -m
MODULE OPTIONS` with `DEVICE:BACKEND --nproc-per-node PROCESSES SCRIPT FLAGS`, of which
the first is what this machine will use. NNODES, or HOSTS in the first form, tells of
more machines (docs/multinode.md). A mistake in flags, data or checkpoint ends with
status 2 and one line, where a launcher would wrap it into a page per process. With
PREFLIGHT=1 the launcher starts launch/preflight.py first.
"""

import importlib.util
import os
import runpy
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from common.checkpoint import (
    check_recipe,
    find_checkpoint,
    lock_output,
    read_checkpoint,
    recipe_of,
)
from launch.cores import own_cores
from common.data import check_datasets, share_out
from common.device import (
    check_devices,
    device_and_backend,
    processes_per_machine,
    usable_gpus,
)
from common.errors import UserError, exit_status
from launch.machines import (
    check_own_address,
    machines_from_environment,
    slots_of_hosts,
)
from common.model import check_image_size


def check(args: Namespace, processes: int, world_size: int | None = None) -> None:
    """Raise what training with these arguments would stumble over.

    Leaves the GPUs alone: the caller only starts those that use them.

    Args:
        args: of the script.
        processes: number of them on this machine.
        world_size: number of them on all machines, if not `processes` on each of
            `args.nnodes`.

    Raises:
        UserError: too few GPUs, bad data, a batch that cannot be divided, a checkpoint
            that cannot be used.
    """
    backend = getattr(args, "backend", "no process group")
    check_devices(args.device, processes, backend)
    world_size = world_size or processes * getattr(args, "nnodes", 1)
    share_out(args, 0, world_size, processes)
    if world_size > processes:
        gpus = args.device != "cpu" and usable_gpus()
        if backend == "gloo" or (backend is None and not gpus):
            check_own_address()
    check_image_size(args, check_datasets(args))
    # On more machines than this one rank 0 can have the lock by now, for the same run
    if world_size == processes and not args.evaluate:
        lock = lock_output(Path(args.output))
        if lock is not None:
            lock.close()
    path = find_checkpoint(args)
    if path is not None:
        content = read_checkpoint(path)
        recipe = recipe_of(args)
        if args.precision is None:
            recipe.pop("precision", None)  # decided where the device is known
        check_recipe(path, content, recipe)


def script_arguments(script: Path, flags: list[str]) -> Namespace:
    """Parse flags as the script itself does, without running it."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.argv[0] = str(script)  # whose name mistakes are reported under
    return module.arguments(flags)


def set_threads(processes: int) -> None:
    """Share the machine's cores out evenly to the compute threads of its processes."""
    os.environ.setdefault("OMP_NUM_THREADS", str(own_cores(processes)))


def preflight(args: Namespace, launcher: list[str]) -> None:
    """Start launch/preflight.py in the place of the training; end where it fails.

    Args:
        args: of the training.
        launcher: the command that starts a script in all processes.
    """
    script = Path(__file__).resolve().parent.parent / "scripts" / "preflight.py"
    command = [*launcher, str(script), "--device", args.device]
    command += ["--backend", args.backend] if args.backend else []
    once = {**os.environ, "MAX_RESTARTS": "0"}
    own, lines = f"{script.name}: ", []
    with subprocess.Popen(
        command, env=once, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            for line in process.stderr:
                lines.append(line)
                if line.startswith(own):
                    sys.stderr.write(line)
        except KeyboardInterrupt:
            process.terminate()
            raise
    if process.returncode:
        # torchrun adds lines of its own, which matter where there are no others
        if not any(line.startswith(own) for line in lines):
            sys.stderr.writelines(lines)
        sys.exit(process.returncode)


def restart_flags(args: Namespace) -> list[str]:
    """What processes that a launcher may start again are told besides.

    Raises:
        UserError: they could not go on from where they died.
    """
    if args.resume not in (None, "auto"):
        raise UserError(
            f"MAX_RESTARTS goes with --resume auto, not with --resume {args.resume}"
        )
    return [] if args.resume or args.evaluate else ["--resume", "auto"]


def main() -> None:
    """Check the command line in sys.argv, and go on as its launcher."""
    end = sys.argv.index("--")
    (script, count, *launcher), flags = sys.argv[1:end], sys.argv[end + 1 :]
    args = script_arguments(Path(script), flags)
    if count and (not count.isdigit() or not int(count)):
        raise UserError(f"NPROC={count} is no number of processes")
    machines = machines_from_environment(os.environ)
    hosts = os.environ.get("HOSTS") if not launcher else None
    if hosts and count:
        raise UserError(f"NPROC={count} does not go with HOSTS, which has the numbers")
    if hosts:
        slots = slots_of_hosts(hosts).values()
        processes, world_size = max(slots), sum(slots)
    else:
        processes = int(count) if count else processes_per_machine(args.device)
        world_size = processes * machines.count
    if machines.max_restarts:
        flags += restart_flags(args)
    check(args, processes, world_size)
    if not launcher:
        print(world_size)
        return
    module, *options = launcher
    set_threads(processes)
    options += [device_and_backend(args), "--nproc-per-node", str(processes)]
    if os.environ.get("PREFLIGHT", "0") not in ("", "0"):
        preflight(args, [sys.executable, "-m", module, *options])
    # torchrun would die of SIGUSR1, which Slurm can send; of SIGTERM it ends the job
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    sys.argv[1:] = [*options, script, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    with exit_status():
        main()
