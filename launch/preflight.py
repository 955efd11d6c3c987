"""Check before a run that all its processes exist and can reach each other.

    python -m launch.preflight [--nprocs 4]      # one process per GPU, or 2 on a CPU
    torchrun --standalone --nproc-per-node=4 -m launch.preflight
    horovodrun --gloo -np 4 -H localhost:4 python -m launch.preflight --backend horovod
    mpirun -np 4 --bind-to none python -m launch.preflight --backend horovod
    srun python -m launch.preflight              # with MASTER_ADDR and MASTER_PORT

Each process registers with rank 0, uses its device and takes part in an all-reduce.
Rank 0 prints one line per process. If a process does not finish within
--timeout-seconds, rank 0 names it, and all processes exit with status 1. Instead of
options, you can pass a training script and its flags. The first command also reads
NNODES and the related variables, so several machines need no launcher.
"""

import argparse
import os
import socket
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from common.device import check_devices, describe, select_device, usable_gpus
from common.errors import UserError, complain
from launch.check import load_script, number_of_processes
from launch.exits import LOST_PROCESS, exit_status, leave, told
from launch.machines import Machines, host_and_port, reach, use_loopback
from launch.ranks import Ranks, ranks_from_environment
from launch.spawn import wait_for

PORT = 29511
LOOPBACK = "127.0.0.1"
# Each process's stages, and the message if it does not finish one
STAGES = {
    "host": "did not register",
    "device": "registered, but its device did not answer",
    "all-reduce": "did not finish the all-reduce",
}


def ranks_of_launcher(environment: Mapping[str, str], slurm: bool) -> Ranks | None:
    """Read the ranks that a launcher has set; None without a launcher.

    Source: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
    """
    for prefix in ("HOROVOD_", "OMPI_COMM_WORLD_"):
        if prefix + "RANK" in environment:
            names = ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")
            return Ranks(*(int(environment[prefix + name]) for name in names))
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")  # one task may be a shell
    if "RANK" in environment or (slurm and tasks != "1"):
        return ranks_from_environment(environment)
    return None


def main() -> None:
    """Take part, if a launcher started this process; otherwise start the processes."""
    args = arguments()
    ranks = ranks_of_launcher(os.environ, slurm=not args.script)
    if ranks is not None:
        host = os.environ.get("MASTER_ADDR") or LOOPBACK
        port = int(os.environ.get("MASTER_PORT") or PORT)
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        take_part(args, ranks, host, port, serve=ranks.rank == 0 and not agent)
    if args.backend == "horovod":
        raise UserError("use horovodrun or mpirun to start --backend horovod")
    machines = args.machines or Machines.from_environment()
    if not args.machines and machines.least < machines.count:
        raise UserError("PREFLIGHT=1 needs a fixed number of machines, not LEAST:MOST")
    args.nprocs = number_of_processes(args.nprocs, args.device)
    check_devices(args.device, args.nprocs, args.backend)
    if machines.count == 1:
        use_loopback()
        machines = Machines(rank=0, host=LOOPBACK)
    store = open_store(machines.host, machines.port, machines.serves, args.seconds)
    number = 0 if machines.serves else machines.rank or store.add("machines", 1)
    place = (args, number, machines.count, machines.host, store.port)
    wait_for(mp.spawn(worker, place, nprocs=args.nprocs, join=False))


def worker(
    local_rank: int, args: Namespace, number: int, count: int, host: str, port: int
) -> None:
    """Run the check in a process that main() started."""
    with exit_status(local_rank):
        rank, size = number * args.nprocs + local_rank, count * args.nprocs
        take_part(args, Ranks(rank, local_rank, size, args.nprocs), host, port)


def open_store(host: str, port: int, serve: bool, seconds: int) -> dist.TCPStore:
    """Serve the store (on loopback only, for one machine), or connect to it."""
    options = {"timeout": timedelta(seconds=6 * seconds), "wait_for_workers": False}
    if serve:
        listener = socket.create_server((host if host == LOOPBACK else "", port))
        port = listener.getsockname()[1]
        options |= {"is_master": True, "master_listen_fd": listener.detach()}
    else:
        reach(host, port, seconds)
    timer = end_after(seconds, f"the server at {host}:{port} is not rank 0")
    store = dist.TCPStore(host, port, **options)
    timer.cancel()
    return store


def end_after(seconds: float, problem: str) -> threading.Timer:
    """End this process with one line, unless the timer is cancelled first."""
    timer = threading.Timer(seconds, lambda: (complain(problem), os._exit(1)))
    timer.daemon = True
    timer.start()
    return timer


def take_part(
    args: Namespace, ranks: Ranks, host: str, port: int, serve: bool = False
) -> None:
    """Go through all stages and exit with the status that rank 0 sends."""
    rank, size, seconds = ranks.rank, ranks.world_size, args.seconds
    end_after(5 * seconds, f"rank {rank}: rank 0 did not answer")
    store = open_store(host, port, serve, seconds)
    if rank == 0:
        mine = open_store(host, store.port, False, seconds)
        threading.Thread(target=judge, args=(mine, size, seconds), daemon=True).start()
    store.set(f"host {rank}", socket.gethostname())
    try:
        gpus = args.device != "cpu" and usable_gpus() > 0
        backend = args.backend or ("nccl" if gpus else "gloo")
        device = select_device(args.device, ranks.local_rank, backend)
        torch.ones(1000, device=device).sum().item()
        store.set(f"device {rank}", f"{device} {describe(device)} {backend}")
        store.wait(["all have a device"])
        milliseconds = all_reduce(store, ranks, backend, device, seconds)
        store.set(f"all-reduce {rank}", f"{milliseconds:.1f}")
    except Exception as error:  # from any library; rank 0 prints it
        store.set(f"problem {rank}", told(error) if str(error) else repr(error))
    problem = store.get("end")
    time.sleep(0 if rank else 1)  # rank 0 may serve the store
    leave(1 if problem else 0)  # skip the libraries' destructors, which could hang


def all_reduce(
    store: dist.Store, ranks: Ranks, backend: str, device: torch.device, seconds: int
) -> float:
    """Sum over all processes twice; return the second sum's time in milliseconds."""
    if backend == "horovod":
        import horovod.torch as hvd

        hvd.init()
    else:
        limit, store = timedelta(seconds=2 * seconds), dist.PrefixStore("group", store)
        size, rank = ranks.world_size, ranks.rank
        dist.init_process_group(backend, None, limit, size, rank, store)
    for _ in range(2):  # the first one also connects
        tensor = torch.full((1024,), ranks.rank + 1.0, device=device)
        began = time.perf_counter()
        if backend == "horovod":
            tensor = hvd.allreduce(tensor, op=hvd.Sum, name="preflight")
        else:
            dist.all_reduce(tensor)
        found = tensor[-1].item()
        milliseconds = 1000 * (time.perf_counter() - began)
        if found != ranks.world_size * (ranks.world_size + 1) / 2:
            raise RuntimeError(f"the all-reduce sum {found} is wrong")
    if backend == "horovod":
        hvd.shutdown()
    return milliseconds


def judge(store: dist.Store, world_size: int, seconds: int) -> None:
    """Monitor all processes, print the result and tell the processes to exit."""
    problem = ""
    for stage, failure in STAGES.items():
        until = time.monotonic() + seconds
        while not problem and len(done := read(store, stage, world_size)) < world_size:
            time.sleep(0.1)
            hosts = read(store, "host", world_size)
            if read(store, "problem", world_size):
                time.sleep(1)  # others may report only the lost connection
                told = read(store, "problem", world_size)
                hosts = read(store, "host", world_size)
                rank = min(told, key=lambda rank: bool(LOST_PROCESS.search(told[rank])))
                problem = f"rank {rank} ({hosts[rank]}): {told[rank]}"
            elif time.monotonic() > until:
                late = sorted({*range(world_size)} - {*done})
                names = ", ".join(f"rank {r} ({hosts.get(r, 'host ?')})" for r in late)
                problem = f"{names} {failure} within {seconds} s"
        if stage == "device" and not problem:
            store.set("all have a device", "")
    if problem:
        complain(problem)
        store.set("end", problem)
        time.sleep(3)
        os._exit(1)  # the main thread may hang
    hosts, devices = (read(store, stage, world_size) for stage in ("host", "device"))
    for rank in range(world_size):
        print(f"rank {rank}: {hosts[rank]}, {devices[rank]}")
    slowest = max(map(float, done.values()))
    print(f"preflight: {world_size} processes, all-reduce correct, {slowest} ms")
    sys.stdout.flush()
    store.set("end", "")


def read(store: dist.Store, key: str, world_size: int) -> dict[int, str]:
    """Return the values that processes have stored under a key, by rank."""
    found = [rank for rank in range(world_size) if store.check([f"{key} {rank}"])]
    return {rank: store.get(f"{key} {rank}").decode() for rank in found}


def arguments() -> Namespace:
    """Parse the command line, and a training script's flags if they follow."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--backend", choices=("nccl", "gloo", "horovod"), help="default: by device")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--nprocs", metavar="N", default="auto", help="processes, without a launcher")
    add("--timeout-seconds", metavar="N", dest="seconds", type=int, default=30)
    add("script", nargs="?", type=Path, help="a training script, followed by its flags")
    add("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.machines = None
    if args.script:
        own_name = sys.argv[0]
        training = load_script(args.script).arguments(args.flags)
        sys.argv[0] = own_name
        args.device = training.device
        args.backend = args.backend or getattr(training, "backend", None)
        if args.nprocs == "auto":
            args.nprocs = str(getattr(training, "nprocs", "auto"))
        if url := getattr(training, "dist_url", None):
            where = host_and_port(url.removeprefix("tcp://"), f"--dist-url {url}")
            args.machines = Machines(training.nnodes, training.node_rank, *where)
    return args


if __name__ == "__main__":
    with exit_status():
        main()
        sys.exit()  # not at once: other machines may still use this process's store
