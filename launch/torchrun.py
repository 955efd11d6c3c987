"""Run torchrun for the launch scripts.

    python -m launch.torchrun --nproc-per-node 4 distributed.py --data DIR

It differs from torchrun in four ways:

- Flags, data and checkpoint are checked once, before any process starts.
- On one machine, it listens only on loopback. `torchrun --standalone` would serve its
  store, from which it unpickles data, on every network interface.
- A process that fails prints one line; bad input (status 2) does not restart the job.
- It reads NNODES and the related environment variables (docs/multinode.md), including
  LAUNCHER=launch, which selects the older torch.distributed.launch.
"""

import contextlib
import importlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping

from torch.distributed import TCPStore
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import ProcessFailure, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousInfo
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous as static

from common.errors import UserError, complain, say
from launch.agreement import check_batch
from launch.check import check, load_script, number_of_processes, parser, set_threads
from launch.exits import PORT_IN_USE, exit_status, leave
from launch.machines import Machines, own_address, reach, use_loopback

SAID = (1, 2, 130, 143)  # the process has printed why; see exit_status()
FINAL = "bad input"  # a key in the store that all machines share
MODULES = {"torchrun": "torch.distributed.run", "launch": "torch.distributed.launch"}


class LoopbackRendezvous(static.StaticTCPRendezvous):
    """A single-machine rendezvous whose store listens on loopback."""

    def __init__(self, parameters: rendezvous.RendezvousParameters):
        super().__init__("127.0.0.1", 0, 0, 1, parameters.run_id, 0)

    def get_backend(self) -> str:
        """The name of this rendezvous backend."""
        return "loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        """Start, or restart, with an empty store.

        Source: https://github.com/pytorch/pytorch/issues/135712
        """
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        # Without our own listener, the store would listen on all interfaces
        fd = listener.detach()
        options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": fd}
        self.store = TCPStore(*address, **options)
        where = rendezvous.RendezvousStoreInfo(*address)
        return RendezvousInfo(self.store, 0, 1, where)


def options_for(machines: Machines) -> list[str]:
    """Return torchrun's options for the machines."""
    options = ["--nnodes", f"{machines.least}:{machines.count}"]
    options += ["--max-restarts", str(machines.max_restarts)]
    if machines.host is None:
        options += ["--rdzv-backend", "loopback", "--rdzv-id", "one-machine"]
        return [*options, "--rdzv-endpoint", "127.0.0.1"]  # or torchrun warns
    host, port, seconds = machines.host, machines.port, machines.join_seconds
    if machines.rank is not None:
        options += ["--node-rank", str(machines.rank), "--master-addr", host]
        options += ["--master-port", str(port)]
        return [*options, "--rdzv-conf", f"timeout={seconds}"]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{port}"]
    options += ["--rdzv-id", os.environ.get("RDZV_ID") or "several-machines"]
    # By default, torchrun sends the others this machine's name, which may not resolve
    address = own_address(host, port)
    options += ["--local-addr", address] if address else []
    # torchrun notices a lost machine after 15 s, and then waits 30 s for another
    join = seconds + 60 * (machines.least < machines.count)
    conf = f"is_host={machines.serves},join_timeout={join},read_timeout={seconds}"
    return [*options, "--rdzv-conf", conf]


def end_at_bad_input() -> None:
    """Make the launchers on all machines exit with status 2 when one process does."""
    monitor = LocalElasticAgent._monitor_workers

    def monitor_workers(agent, group):
        result, others = monitor(agent, group), group.group_world_size > 1
        final = any(failure.exitcode == 2 for failure in result.failures.values())
        if result.failures and others and not final:
            time.sleep(1)  # did another machine find bad input?
        with contextlib.suppress(RuntimeError):  # the store's machine is gone
            if final:
                agent._store.set(FINAL, "")
            if agent._store.check([FINAL]):
                if final and others:
                    time.sleep(3)  # so that the others can read it
                raise SystemExit(2)
        if result.failures and agent._remaining_restarts:
            left = f"restarts left: {agent._remaining_restarts}"
            say(f"{how_ended(*root_cause(result.failures))}; restarting ({left})")
        return result

    LocalElasticAgent._monitor_workers = monitor_workers


def run(launcher: str, machines: Machines, arguments: list[str]) -> int:
    """Run one of PyTorch's launchers in this process and return the exit status.

    The status is 2 if any process found bad input; 1 if a signal ended the process or
    the launcher, or if a machine was lost; otherwise the first failed process's status.
    """
    # torchrun logs a long message per failed process; we print one line
    api = "torch.distributed.elastic.multiprocessing.api"
    logging.getLogger(api).setLevel(logging.CRITICAL)
    try:
        module = importlib.import_module(MODULES[launcher])
        module.main([*options_for(machines), *arguments])
    except SystemExit as ended:  # from end_at_bad_input(), or torchrun's own parser
        return ended.code
    except ChildFailedError as error:
        rank, failure = root_cause(error.failures)
        if failure.exitcode not in SAID:
            complain(how_ended(rank, failure))
        return max(failure.exitcode, 1)
    except SignalException as error:
        say(f"signal {int(error.sigval)} ended {launcher}")
        return 1
    except (RendezvousError, RuntimeError) as error:  # stores raise the second
        cause = error.__cause__ or error
        if machines.host is None or PORT_IN_USE.search(str(cause)):
            raise cause from None
        reason = (str(cause) or type(cause).__name__).splitlines()[0]
        complain(
            f"{socket.gethostname()}: not all {machines.count} machines connected to "
            f"{machines.host}:{machines.port} within {machines.join_seconds} s "
            f"(JOIN_SECONDS; PREFLIGHT=1 lists missing processes): {reason}"
        )
        return 1
    return 0


def how_ended(rank: int, failure: ProcessFailure) -> str:
    """Describe a rank and its exit status or signal in words."""
    status = failure.exitcode
    how = f"by {failure.signal_name()}" if status < 0 else f"with status {status}"
    return f"rank {rank} on {socket.gethostname()} ended {how}"


def root_cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Find the rank that failed first.

    Other ranks lost contact with it (status 1), or torchrun ended them with SIGTERM or,
    30 seconds later, SIGKILL.
    """
    first = min(failure.timestamp for failure in failures.values())

    def place(item: tuple[int, ProcessFailure]) -> int:
        status = item[1].exitcode
        if status == -signal.SIGTERM or status < 0 and item[1].timestamp > first + 10:
            return 4
        return {2: 1, 1: 2, 130: 3, 143: 3}.get(status, 0)

    return min(failures.items(), key=place)


def main() -> None:
    """Check the command line in sys.argv, then launch it."""
    launch = parser(__doc__).parse_args()
    script = load_script(launch.script)
    args = script.arguments(launch.flags)
    launcher = os.environ.get("LAUNCHER") or "torchrun"
    if launcher not in MODULES:
        raise UserError(f"LAUNCHER={launcher}; choose torchrun or launch")
    machines = Machines.from_environment()
    processes = number_of_processes(launch.nproc_per_node, args.device)
    flags = launch.flags
    if machines.max_restarts and args.resume not in (None, "auto"):
        raise UserError(f"MAX_RESTARTS needs --resume auto, not {args.resume}")
    if machines.max_restarts and not (args.resume or args.evaluate):
        flags = [*flags, "--resume", "auto"]
    for number in range(machines.least, machines.count):
        check_batch(args, processes * number)
    check(args, processes, processes * machines.count, script)
    set_threads(processes)
    if machines.host is None:
        use_loopback()
        rendezvous.rendezvous_handler_registry.register("loopback", LoopbackRendezvous)
    else:
        if not machines.serves:
            reach(machines.host, machines.port, machines.join_seconds)
        # Otherwise a machine that rejoins numbers its runs differently from the others:
        # https://github.com/pytorch/pytorch/issues/135712
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # SIGUSR1, which Slurm can send, would kill torchrun; SIGTERM makes it end the job
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    end_at_bad_input()
    words = ["--nproc-per-node", str(processes), str(launch.script), *flags]
    status = run(launcher, machines, words)
    if machines.host is None:
        leave(status)
    sys.exit(status)  # not at once: other machines may still use this process's store


if __name__ == "__main__":
    with exit_status():
        main()
