"""See that all processes of a job are there and reach one another, before it runs.

Started as the training is, or without a launcher for one process per GPU (2 on a CPU):

    python launch/preflight.py [--nprocs 4]
    torchrun --standalone --nproc-per-node=4 launch/preflight.py
    python -m torch.distributed.launch --nproc-per-node=4 launch/preflight.py
    horovodrun -np 4 -H localhost:4 python launch/preflight.py --backend horovod
    mpirun -np 4 --bind-to none python launch/preflight.py --backend horovod

Each process registers with rank 0, computes something on its device and takes part in
an all-reduce. Rank 0 prints a line for each. One that does not register or answer
within --timeout-seconds is named, and all end with a status that is not 0.

Behind its own flags may stand a training script with its flags, which then say device,
backend and number of processes:

    python launch/preflight.py multiprocessing_distributed.py --data DIR --nprocs 4
"""

import argparse
import contextlib
import errno
import json
import os
import socket
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

# What the libraries say of their attempts to connect is said here in one line
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

from common.device import (  # noqa: E402
    check_devices,
    describe,
    processes_per_machine,
    select_device,
    usable_gpus,
)
from common.errors import (  # noqa: E402
    LOST_PROCESS,
    UserError,
    complain,
    exit_status,
    leave,
    told,
)
from common.launch import Ranks, ranks_from_environment, wait_for  # noqa: E402
from launch.limits import describe_limits  # noqa: E402
from launch.machines import use_loopback  # noqa: E402

TORCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
# The same four of horovodrun and of Open MPI
OTHERS = tuple(
    tuple(prefix + name for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE"))
    for prefix in ("HOROVOD_", "OMPI_COMM_WORLD_")
)
PORT = "29511"
LOOPBACK = ("127.0.0.1", "localhost")
# What a process does, and what is said of one that does not get that far
STAGES = {
    "registration": "did not register",
    "device": "registered, but its device did not answer",
    "all-reduce": "did not finish the all-reduce",
}
SILENT = "registered and then fell silent"
BEAT = 0.1  # seconds between two signs of life
SILENCE = 2.0  # seconds without one that make a process count as hanging


class Trouble(Exception):
    """What rank 0 found out: the text is the line that it prints."""


def ranks_of_launcher(
    environment: Mapping[str, str], slurm: bool = True
) -> Ranks | None:
    """Read the ranks that a launcher handed down; None where there was no launcher.

    Args:
        environment: os.environ, or a mapping like it.
        slurm: whether srun counts as a launcher.

    Raises:
        UserError: a variable is missing, no number, or out of range.

    Sources: https://horovod.readthedocs.io/en/stable/api.html and
    https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
    """
    for names in (TORCH, *OTHERS):
        if names[0] in environment:
            pairs = zip(TORCH, names, strict=True)
            return ranks_from_environment(
                {ours: environment[name] for ours, name in pairs if name in environment}
            )
    # One task may be a shell, and those that begin with a script start processes
    if slurm and environment.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return ranks_from_environment(environment)
    return None


def main(argv: list[str] | None = None) -> None:
    """Take part as the process that a launcher started, or start the processes."""
    args = arguments(argv)
    ranks = ranks_of_launcher(os.environ, slurm=not args.script)
    if ranks is not None:
        take_part(args, ranks)
        return
    if args.backend == "horovod":
        raise UserError("--backend horovod needs horovodrun or mpirun to start it")
    if args.nnodes == 1:
        use_loopback()
    args.nprocs = args.nprocs or processes_per_machine(args.device)
    check_devices(args.device, args.nprocs, args.backend)
    args.meet = args.meet or (LOOPBACK[0], free_port())
    wait_for(mp.spawn(worker, args=(args,), nprocs=args.nprocs, join=False))


def worker(local_rank: int, args: Namespace) -> None:
    """What each process runs that was started without a launcher."""
    with exit_status(local_rank):
        host, port = args.meet
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        rank = args.node_rank * args.nprocs + local_rank
        world_size = args.nnodes * args.nprocs
        take_part(args, Ranks(rank, local_rank, world_size, args.nprocs))


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK[0], 0))
        return listener.getsockname()[1]


# --- one process ---


def take_part(args: Namespace, ranks: Ranks) -> None:
    """Register, wait for what rank 0 makes of it, and leave as it says."""
    backend = args.backend or ("nccl" if uses_gpu(args) else "gloo")
    check_backend(args, backend, ranks)
    host, port = meeting_point(ranks)
    me = f"rank {ranks.rank} ({socket.gethostname()})"
    alarm = Alarm(
        max(args.seconds, 2 * SILENCE), f"{me}: rank 0 at {host}:{port} did not answer"
    )
    try:
        stores, judges = open_stores(ranks, host, port, alarm)
        record = {
            "rank": ranks.rank,
            "world_size": ranks.world_size,
            "local_rank": ranks.local_rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "backend": backend,
            "limits": describe_limits(),
        }
        number = stores[0].add("arrivals", 1) - 1
        stores[0].set(f"arrival/{number}", json.dumps(record))
        task = Task(args, backend, ranks, stores[1])
        threading.Thread(target=task.run, daemon=True).start()
        if judges:
            problem = judge(stores[0], ranks.world_size, args.seconds, alarm)
        else:
            problem = wait_for_judge(stores[0], number, alarm)
            if problem and ranks.rank == 0:
                complain(problem)  # another one serves, and speaks for itself
        if not problem:
            alarm.again(f"{me}: {backend} did not end")
            task.finish()
    except RuntimeError as error:
        if not LOST_PROCESS.search(str(error)):
            raise
        complain(f"{me} lost rank 0 at {host}:{port}: {told(error)}")
        leave(1)
    leave(1 if problem else 0)  # no destructor of a library waits for anybody


def uses_gpu(args: Namespace) -> bool:
    """Whether the processes compute on GPUs."""
    return args.device != "cpu" and usable_gpus() > 0


def check_backend(args: Namespace, backend: str, ranks: Ranks) -> None:
    """Raise what makes the backend impossible on this machine, in every process alike.

    Raises:
        UserError: too few GPUs, or no Horovod that fits.
    """
    try:
        check_devices(args.device, ranks.local_world_size, backend)
    except UserError as error:
        error.one_process_only = False
        raise
    if backend == "horovod":
        try:
            import horovod.torch as hvd
        except ImportError as error:
            raise UserError(
                f"Horovod is missing ({error}): bash scripts/install_horovod.sh"
            ) from None
        if uses_gpu(args) and not hvd.nccl_built():
            raise UserError("this Horovod is built without NCCL; --device cpu")


def meeting_point(ranks: Ranks) -> tuple[str, int]:
    """Host and port of rank 0: MASTER_ADDR and MASTER_PORT, or this machine's.

    Raises:
        UserError: there are several machines and no MASTER_ADDR, or no such port.
    """
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT") or PORT
    if not host and ranks.local_world_size < ranks.world_size:
        raise UserError(
            "there are several machines, and no MASTER_ADDR says which one is rank 0's"
        )
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"MASTER_PORT={port} is no port")
    return host or LOOPBACK[0], int(port)


class Alarm:
    """Ends this process, in one line, where the main thread waits too long."""

    def __init__(self, seconds: float, problem: str):
        """Begin to wait for `seconds`; `problem` says what did not happen by then."""
        self.seconds = seconds
        self.problem = problem
        self.again()
        threading.Thread(target=self._watch, daemon=True).start()

    def again(self, problem: str | None = None) -> None:
        """Begin anew, and wait for something else where `problem` is given."""
        self.problem = problem or self.problem
        self.until = time.monotonic() + self.seconds

    def _watch(self) -> None:
        while time.monotonic() < self.until:
            time.sleep(BEAT)
        complain(f"{self.problem} within {self.seconds:.0f} s")
        os._exit(1)


def open_stores(
    ranks: Ranks, host: str, port: int, alarm: Alarm
) -> tuple[list[dist.Store], bool]:
    """Serve the store (rank 0), or connect to it once it is served.

    Returns:
        two connections, as one that waits lets nobody else in, and whether this process
        is the one that judges. A second rank 0 is not: it is a mistake to be judged.

    Raises:
        UserError: another program listens at the port.
    """
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listener = None if ranks.rank or served else listen(host, port)
    limit = timedelta(seconds=3 * alarm.seconds)  # it is the alarm that ends waiting
    options = {"timeout": limit, "wait_for_workers": False}
    if listener is None:
        if ranks.rank == 0 and not served:
            alarm.again(
                f"port {port} is taken by a program that did not answer as rank 0 does "
                "(set another MASTER_PORT)"
            )
        reach(host, port)
    else:
        # The store takes it over. Made by itself it would listen on every network
        options |= {"is_master": True, "master_listen_fd": listener.detach()}
    first = dist.TCPStore(host, port, **options)
    second = dist.TCPStore(host, port, timeout=limit, wait_for_workers=False)
    prefix = f"preflight{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"
    stores = [dist.PrefixStore(prefix, store) for store in (first, second)]
    return stores, ranks.rank == 0 and stores[0].add("judges", 1) == 1


def listen(host: str, port: int) -> socket.socket | None:
    """Listen at a port, on loopback alone where all meet there.

    Returns:
        None where the port is taken: maybe by another process that is called rank 0.

    Raises:
        UserError: there is no such host, or this process may not use the port.
    """
    address = host if host in LOOPBACK else ""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise UserError(f"rank 0 cannot listen at {host}:{port}: {error}") from None


def reach(host: str, port: int) -> None:
    """Wait until something listens there; the alarm ends it."""
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError:
            time.sleep(BEAT)


class Task:
    """What a process does beside waiting: its device, and the all-reduce."""

    def __init__(self, args: Namespace, backend: str, ranks: Ranks, store: dist.Store):
        self.args = args
        self.backend = backend
        self.ranks = ranks
        self.store = store
        self.finish: Callable[[], None] = lambda: None

    def run(self) -> None:
        """Do all of it, and publish each result or what went wrong."""
        for stage, step in (("device", self.compute), ("all-reduce", self.all_reduce)):
            try:
                result = {"result": step()}
            except Exception as error:  # of any library; rank 0 tells it
                result = {"problem": told(error) if str(error) else repr(error)}
            with contextlib.suppress(RuntimeError):  # rank 0 is lost: see take_part()
                self.store.set(f"{stage}/{self.ranks.rank}", json.dumps(result))
            if "problem" in result:
                return

    def compute(self) -> str:
        """Add something up on the device; returns its name."""
        self.device = select_device(
            self.args.device, self.ranks.local_rank, self.backend
        )
        total = torch.arange(1000, device=self.device).sum().item()
        if total != 499500:
            raise RuntimeError(f"{self.device} adds 0 to 999 up to {total}")
        return f"{self.device} {describe(self.device)}"

    def all_reduce(self) -> float:
        """Sum over all processes, twice; returns milliseconds of the second time."""
        self.store.wait(["begin"])
        reduce = self.connect()
        ranks, size = self.ranks, self.ranks.world_size
        expected = size * (size + 1) / 2
        for _ in range(2):  # the first one also connects
            tensor = torch.full((1024,), ranks.rank + 1.0, device=self.device)
            began = time.perf_counter()
            found = reduce(tensor).tolist()
            milliseconds = 1000 * (time.perf_counter() - began)
            if set(found) != {expected}:
                raise RuntimeError(f"the sum is {found[0]} in place of {expected}")
        return milliseconds

    def connect(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Initialise the backend; returns its sum over all processes."""
        ranks = self.ranks
        if self.backend != "horovod":
            dist.init_process_group(
                self.backend,
                store=dist.PrefixStore("group", self.store),
                rank=ranks.rank,
                world_size=ranks.world_size,
                timeout=timedelta(seconds=3 * self.args.seconds),
                device_id=self.device if self.backend == "nccl" else None,
            )
            self.finish = dist.destroy_process_group
            return lambda tensor: (dist.all_reduce(tensor), tensor)[1]

        import horovod.torch as hvd

        os.environ.setdefault(
            "HOROVOD_GLOO_TIMEOUT_SECONDS", str(3 * self.args.seconds)
        )
        hvd.init()
        if (hvd.rank(), hvd.size()) != (ranks.rank, ranks.world_size):
            raise RuntimeError(
                f"Horovod takes this process for rank {hvd.rank()} of {hvd.size()}, "
                f"the environment for {ranks.rank} of {ranks.world_size}"
            )
        self.finish = hvd.shutdown
        return lambda tensor: hvd.allreduce(tensor, op=hvd.Sum, name="preflight")


def wait_for_judge(store: dist.Store, number: int, alarm: Alarm) -> str:
    """Give signs of life until rank 0 has judged, and return what it says.

    As long as rank 0 gives signs of life itself it is waited for, as it has a limit for
    everything.
    """
    beats, heard = 0, ""
    while not store.check(["end"]):
        beats += 1
        store.set(f"beat/{number}", str(beats))
        if store.check(["judge"]) and store.get("judge") != heard:
            heard = store.get("judge")
            alarm.again()
        time.sleep(BEAT)
    problem = store.get("end").decode()
    store.add("left", 1)
    return problem


# --- rank 0 ---


def judge(store: dist.Store, world_size: int, seconds: int, alarm: Alarm) -> str:
    """Follow all processes, print what comes of it, and tell the others.

    Returns:
        what went wrong in one line, or nothing.
    """
    arrivals: list[dict] = []
    problem = ""
    try:
        for stage in STAGES:
            if stage == "all-reduce":
                store.set("begin", "")
            results = follow(store, stage, arrivals, world_size, seconds, alarm)
            if stage == "device":
                devices = results
        print_table(arrivals, devices, max(results.values()))
    except Trouble as trouble:
        problem = str(trouble)
        complain(problem)
    store.set("end", problem)
    # This process serves the store and leaves last, but not after one that hangs
    until = time.monotonic() + (SILENCE if problem else seconds)
    while store.add("left", 0) < len(arrivals) - 1 and time.monotonic() < until:
        alarm.again()
        time.sleep(BEAT)
    return problem


def follow(
    store: dist.Store,
    stage: str,
    arrivals: list[dict],
    world_size: int,
    seconds: int,
    alarm: Alarm,
) -> dict[int, Any]:
    """Wait until every rank is through a stage.

    Args:
        arrivals: records of the processes that have registered; grows.

    Returns:
        what each rank published.

    Raises:
        Trouble: a rank is missing, silent or in trouble, or two contradict each other.
    """
    until = time.monotonic() + seconds
    results: dict[int, Any] = {}
    beats = 0
    while len(results) < world_size:
        beats += 1
        store.set("judge", f"{stage} {beats}")
        alarm.again()
        while len(arrivals) < store.add("arrivals", 0):
            arrivals.append(json.loads(store.get(f"arrival/{len(arrivals)}")))
            check_arrival(arrivals, world_size)
        if stage == "registration":
            results = {record["rank"]: None for record in arrivals}
        else:
            read_results(store, stage, arrivals, results)
        if time.monotonic() > until and len(results) < world_size:
            late = [rank for rank in range(world_size) if rank not in results]
            hanging = silent(store, arrivals)
            if hanging and stage != "registration":
                raise Trouble(f"{named(hanging, arrivals)} {SILENT}")
            if stage == "all-reduce" and len(late) == world_size:
                raise Trouble(f"no process finished the all-reduce within {seconds} s")
            raise Trouble(f"{named(late, arrivals)} {STAGES[stage]} within {seconds} s")
        time.sleep(BEAT)
    return results


def check_arrival(arrivals: list[dict], world_size: int) -> None:
    """See that the last one to register agrees with the others.

    Raises:
        Trouble: it has another's rank, or counts processes differently.
    """
    *others, last = arrivals
    if last["world_size"] != world_size:
        raise Trouble(
            f"rank {last['rank']} ({last['host']}) was told of {last['world_size']} "
            f"processes, rank 0 of {world_size}"
        )
    for other in others:
        if other["rank"] == last["rank"]:
            one, two = (f"{r['pid']} on {r['host']}" for r in (other, last))
            raise Trouble(
                f"rank {last['rank']} is there twice: process {one} and process {two} "
                "(two jobs at one MASTER_PORT?)"
            )
    if last["backend"] != arrivals[0]["backend"]:
        raise Trouble(
            f"rank {last['rank']} ({last['host']}) uses {last['backend']}, "
            f"rank {arrivals[0]['rank']} {arrivals[0]['backend']}"
        )


def read_results(
    store: dist.Store, stage: str, arrivals: list[dict], results: dict[int, Any]
) -> None:
    """Add what ranks have published since.

    Raises:
        Trouble: one of them published a problem. Where another is silent, that one is
            to blame.
    """
    for record in arrivals:
        rank = record["rank"]
        if rank in results or not store.check([f"{stage}/{rank}"]):
            continue
        published = json.loads(store.get(f"{stage}/{rank}"))
        if "problem" in published:
            hanging = silent(store, arrivals) if stage == "all-reduce" else []
            if hanging:
                raise Trouble(f"{named(hanging, arrivals)} {SILENT}")
            raise Trouble(f"{named([rank], arrivals)}: {published['problem']}")
        results[rank] = published["result"]


def silent(store: dist.Store, arrivals: list[dict]) -> list[int]:
    """Registered ranks that give no sign of life any more, after SILENCE seconds."""

    def beats() -> list[bytes]:
        keys = [f"beat/{number}" for number in range(len(arrivals))]
        return [store.get(key) if store.check([key]) else b"" for key in keys]

    before = beats()
    time.sleep(SILENCE)
    pairs = zip(arrivals, before, beats(), strict=True)
    return [r["rank"] for r, old, new in pairs if old == new and r["rank"] != 0]


def named(ranks: Iterable[int], arrivals: list[dict]) -> str:
    """Eight ranks at most and, where they are known, their hosts: "rank 3 (a)"."""
    hosts = {record["rank"]: record["host"] for record in arrivals}
    names = [
        f"rank {rank} ({hosts[rank]})" if rank in hosts else f"rank {rank}"
        for rank in sorted(ranks)
    ]
    more = [f"{len(names) - 8} more"] if len(names) > 8 else []
    return ", ".join([*names[:8], *more])


def print_table(
    arrivals: list[dict], devices: dict[int, str], milliseconds: float
) -> None:
    """Print a line for each process, one for each machine and one for all."""
    records = sorted(arrivals, key=lambda record: record["rank"])
    rows = [
        (
            f"rank {record['rank']}",
            record["host"],
            f"local rank {record['local_rank']}",
            devices[record["rank"]],
            record["backend"],
        )
        for record in records
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    limits = {record["host"]: record["limits"] for record in reversed(records)}
    lines += [f"{host}: {text}" for host, text in sorted(limits.items())]
    lines.append(
        f"preflight: {len(rows)} process{'es' * (len(rows) > 1)}, all-reduce over "
        f"{records[0]['backend']}: correct, {milliseconds:.1f} ms"
    )
    print("\n".join(lines), flush=True)


# --- the command line ---


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        """End with status 2."""
        raise UserError(f"{message} (--help lists the flags)")


def positive(text: str) -> int:
    """Parse an int above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def arguments(argv: list[str] | None = None) -> Namespace:
    """Parse the command line, and that of the training script behind it.

    Raises:
        UserError: an unknown flag or value.
    """
    parser = Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--backend", choices=("nccl", "gloo", "horovod"), help="by the device")
    add("--device", choices=("auto", "cpu", "cuda"), help="auto")
    add("--nprocs", metavar="N", type=positive, help="processes without a launcher")
    add(
        "--timeout-seconds",
        metavar="N",
        dest="seconds",
        type=positive,
        default=30,
        help="longest wait for a process (%(default)s)",
    )
    add("--local-rank", "--local_rank", help="accepted for older launchers")
    add("script", nargs="?", help="a training script, with its flags behind it")
    add("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.nnodes, args.node_rank, args.meet = 1, 0, None
    if args.script:
        if args.device or args.backend or args.nprocs:
            raise UserError(
                f"--device, --backend and --nprocs go behind {args.script}, whose "
                "flags they are"
            )
        take_over(args)
    args.device = args.device or "auto"
    return args


def take_over(args: Namespace) -> None:
    """Set device, backend and processes as the flags of a training script do."""
    from launch.check import script_arguments  # imports what training needs

    me = sys.argv[0]
    training = script_arguments(Path(args.script), args.flags)
    sys.argv[0] = me
    for name in ("device", "backend", "nprocs", "nnodes", "node_rank"):
        setattr(args, name, getattr(training, name, getattr(args, name)))
    if getattr(training, "dist_url", None):
        url = urlsplit(training.dist_url)
        args.meet = url.hostname, url.port
    if training.strategy == "horovod_distributed":
        args.backend = "horovod"


if __name__ == "__main__":
    with exit_status():
        main()
