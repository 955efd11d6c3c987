"""Who this process is, by a launcher's variables, and the signals that stop it."""

import atexit
import contextlib
import logging
import multiprocessing.resource_tracker
import os
import re
import select
import signal
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch.multiprocessing

from common.device import device_and_backend
from common.errors import UserError, complain, this_process
from common.machines import (
    Machines,
    check_address,
    join_seconds,
    meet,
    use_loopback,
)


class Ranks(NamedTuple):
    """The four numbers that place a process in a job."""

    rank: int  # among all processes
    local_rank: int  # among the processes of this machine
    world_size: int  # number of processes
    local_world_size: int  # number of processes on this machine


def ranks_from_environment(environment: Mapping[str, str]) -> Ranks:
    """Read the ranks that torchrun, torch.distributed.launch or srun hand down.

    Args:
        environment: os.environ, or a mapping like it.

    Raises:
        UserError: a variable is missing, no number, out of range, or contradicts
            another.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    missing = [name for name in names if name not in environment]
    if missing and "SLURM_STEP_ID" in environment:
        return _ranks_from_slurm(environment, names)
    if missing:
        hint = "srun or " if "SLURM_JOB_ID" in environment else ""
        raise UserError(
            f"a launcher has to start this script, for example {hint}torchrun "
            f"--standalone --nproc-per-node=2 SCRIPT --data DIR (no "
            f"{', '.join(missing)} in the environment)"
        )
    ranks = Ranks(*_numbers(environment, names))
    if not (
        0 <= ranks.rank < ranks.world_size
        and 0 <= ranks.local_rank < ranks.local_world_size <= ranks.world_size
    ):
        values = ", ".join(f"{name}={environment[name]}" for name in names)
        raise UserError(f"ranks from the launcher contradict each other: {values}")
    return ranks


def _ranks_from_slurm(environment: Mapping[str, str], names: Sequence[str]) -> Ranks:
    """Read the ranks of a task that srun started.

    Source: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
    """
    sources = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NODEID")
    rank, local_rank, world_size, node = _numbers(environment, sources)
    name, text = next(
        (name, environment[name])
        for name in (
            *("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
            *("SLURM_NTASKS_PER_NODE", "SLURM_NTASKS"),  # the last is always there
        )
        if name in environment
    )
    tasks = _tasks_per_node(name, text)
    if name == "SLURM_NTASKS_PER_NODE":
        tasks *= max(1, world_size // tasks[0])

    def refuse(one: str, other: str) -> NoReturn:
        raise UserError(
            f"{one}={environment[one]} contradicts {other}={environment[other]}; "
            "has srun started this task, and nothing between them changed a variable?"
        )

    if sum(tasks) != world_size:
        refuse("SLURM_NTASKS", name)
    if rank >= world_size:
        refuse("SLURM_PROCID", "SLURM_NTASKS")
    if node >= len(tasks):
        refuse("SLURM_NODEID", name)
    if local_rank >= tasks[node]:
        refuse("SLURM_LOCALID", name)
    ranks = Ranks(rank, local_rank, world_size, tasks[node])
    slurm = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", name)
    for variable, value, source in zip(names, ranks, slurm, strict=True):
        if environment.get(variable, str(value)) != str(value):
            refuse(variable, source)
    missing = [v for v in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(v)]
    if missing:
        raise UserError(
            f"srun started this task, and {' and '.join(missing)} say not where rank 0 "
            "listens: scripts/slurm.sbatch sets them"
        )
    return ranks


def _numbers(environment: Mapping[str, str], names: Sequence[str]) -> list[int]:
    """The values of variables, as whole numbers from 0 on.

    Raises:
        UserError: one is none, or missing.
    """
    values = [environment.get(name, "") for name in names]
    if not all(value.isdecimal() for value in values):
        shown = ", ".join(f"{n}={v}" for n, v in zip(names, values, strict=True))
        raise UserError(f"ranks from the launcher have to be numbers: {shown}")
    return [int(value) for value in values]


def _tasks_per_node(name: str, text: str) -> list[int]:
    """Read Slurm's "2(x3),1": the number of tasks of each node.

    Raises:
        UserError: it is not of that form.
    """
    tasks = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match or not int(match[1]):
            raise UserError(f"{name}={text} is not of the form 2(x3),1")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


class Watchdog:
    """Remembers that a signal asked for the end, and ends a process that hangs.

    A signal only sets `stop_requested`, which the training loop reads where the sums
    are combined, so that all processes stop after the same step. Make the watchdog once
    training starts: until then a signal may end the process, there is nothing to save.

    Not every communication library gives up on a process that is gone silent (Horovod
    over MPI does not, and a GPU may wait in NCCL for a process that is dead). So a
    thread of the watchdog ends this process, wherever its main thread waits:

    - where no batch is finished for `timeout`, and `GRACE` seconds more, in which a
      library may say what it knows; the first batch, which may compile, has three
      times as long. Only seconds in which this process runs count: one that was
      suspended continues.
    - at a second signal, `PATIENCE` seconds or more after the first, if no batch was
      finished between the two.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    GRACE = 5
    PATIENCE = 2  # launchers hand one Ctrl-C on several times

    def __init__(self, timeout: timedelta):
        self.stop_requested = False
        self.limit = int(timeout.total_seconds()) + self.GRACE
        self.fed = False
        # Python runs a handler in the main thread; the pipe is written by any
        arrived, written = os.pipe()
        os.set_blocking(written, False)
        for number in self.SIGNALS:
            signal.signal(number, self._remember)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(arrived,), daemon=True).start()

    def feed(self) -> None:
        """Say that a batch is finished."""
        self.fed = True

    def _remember(self, number: int, frame: object) -> None:
        self.stop_requested = True

    def _watch(self, arrived: int) -> None:
        seconds, asked = -2 * self.limit, None
        while seconds < self.limit:
            signals = []
            if select.select([arrived], [], [], 1)[0]:
                signals = [n for n in os.read(arrived, 64) if n in self.SIGNALS]
            else:
                seconds += 1
            if self.fed:
                self.fed, seconds, asked = False, 0, None
            if signals and asked is None:
                asked = time.monotonic()
            elif signals and time.monotonic() - asked > self.PATIENCE:
                complain(f"{this_process()} finished no batch between two signals")
                os._exit(1)
        complain(
            f"{this_process()} finished no batch for {self.limit} s, another process "
            "or the data hangs (--timeout-seconds sets how long to wait)"
        )
        os._exit(1)


def use_fork_server() -> None:
    """Have loader processes forked by a server that is no copy of this process.

    Source:
    https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods
    """
    root = str(Path(__file__).resolve().parent.parent)
    # The server looks for modules there, wherever this process was started
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(["common.forkserver"])
    # The tracker removes what a process that ends at once leaves behind, and need not
    # say so. And SIGUSR1, which mpirun hands to a whole process group, is not for it.
    quiet = "ignore::UserWarning:multiprocessing.resource_tracker"
    warnings, os.environ["PYTHONWARNINGS"] = os.environ.get("PYTHONWARNINGS"), quiet
    handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    multiprocessing.resource_tracker.ensure_running()
    signal.signal(signal.SIGUSR1, handler)
    del os.environ["PYTHONWARNINGS"]
    if warnings is not None:
        os.environ["PYTHONWARNINGS"] = warnings


def rendezvous(args: Namespace, make_store: Callable[..., Any]) -> str:
    """Where the processes of multiprocessing_distributed.py are to meet.

    On a single machine that is a file, so that nothing listens for it; on several it
    is `--dist-url`, once the machines have seen that they were started alike.

    Args:
        args: with dist_url, nnodes, node_rank, nprocs.
        make_store: torch.distributed.TCPStore.

    Raises:
        UserError: a malformed address, a port that is taken, or see meet().
    """
    if args.dist_url is None:
        use_loopback()
        file, path = tempfile.mkstemp(prefix="rendezvous-")
        os.close(file)
        os.unlink(path)  # FileStore makes it
        atexit.register(_remove, path)
        return f"file://{path}"
    host, port = check_address(args.dist_url, args.node_rank)
    if args.nnodes == 1:
        use_loopback()
    else:
        seconds = join_seconds(os.environ)
        machines = Machines(args.nnodes, args.node_rank, f"{host}:{port}", 0, seconds)
        facts = {"--nnodes": args.nnodes, "--nprocs": args.nprocs}
        facts["backend"] = device_and_backend(args)
        store = meet(make_store, machines, {**facts, "NODE_RANK": args.node_rank})
        # The port is then rank 0's, so it has to be free again
        store.add("met", 1)
        until = time.monotonic() + seconds
        while args.node_rank == 0 and store.add("met", 0) < args.nnodes:
            if time.monotonic() > until:
                raise UserError(f"a machine left while all met at {args.dist_url}")
            time.sleep(0.1)
    return args.dist_url


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def wait_for(children: torch.multiprocessing.ProcessContext) -> None:
    """Wait for the processes of torch.multiprocessing.spawn, and end as they end.

    Signals are handed on, so that the children can save and this process outlives them:
    left to itself it would die or hang and leave them behind. When one child fails, the
    others get 10 seconds to notice by themselves, then SIGTERM, then SIGKILL.
    """

    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)

    def hand_on(number: int, frame: object) -> None:
        for child in children.processes:
            child.terminate()

    for number in Watchdog.SIGNALS:
        signal.signal(number, hand_on)
    try:
        while not children.join(grace_period=10):
            pass
    except torch.multiprocessing.ProcessExitedException as error:
        if error.exit_code < 0:
            complain(str(error))
        sys.exit(error.exit_code if error.exit_code > 0 else 1)
