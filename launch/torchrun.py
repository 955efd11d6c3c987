"""torchrun and torch.distributed.launch, as scripts/*.sh start them.

    python -m launch.check SCRIPT 4 launch.torchrun torchrun -- FLAGS

On one machine nothing listens but on loopback: `torchrun --standalone` would open its
store, from which it unpickles, on every network interface. On several machines
(NNODES, see docs/multinode.md) they first see that they were started alike.
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

from torch.distributed import Store, TCPStore
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from common.errors import complain, exit_status, say
from launch.machines import (
    Machines,
    machines_from_environment,
    meet,
    own_address,
    serves,
    use_loopback,
)

SAID = (1, 2, 130, 143)  # the process has said why; see exit_status()
USUAL = ("Sending process", "failed (exitcode")  # what torchrun logs at each failure
FINAL, LEFT = "bad input", "machines that know"  # keys of the machines' store
MODULES = {"torchrun": "torch.distributed.run", "launch": "torch.distributed.launch"}


class LoopbackRendezvous(RendezvousHandler):
    """A rendezvous of one machine with itself, whose store listens on loopback.

    Source: https://docs.pytorch.org/docs/stable/elastic/rendezvous.html
    """

    def __init__(self, parameters: RendezvousParameters):
        self.run_id = parameters.run_id
        self.store = None
        self.closed = False

    @property
    def use_agent_store(self) -> bool:
        """The training processes connect to the same store."""
        return True

    def get_backend(self) -> str:
        """Name of this kind of rendezvous."""
        return "loopback"

    def get_run_id(self) -> str:
        """Name of the job."""
        return self.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Begin, or begin again after a restart, which needs an empty store.

        Source: https://github.com/pytorch/pytorch/issues/135712
        """
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = listener.getsockname()
        # By itself a store listens on all networks
        self.store = TCPStore(
            *address,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return RendezvousInfo(self.store, 0, 1, RendezvousStoreInfo(*address))

    def num_nodes_waiting(self) -> int:
        """Nobody else comes."""
        return 0

    def is_closed(self) -> bool:
        """Whether it is over."""
        return self.closed

    def set_closed(self) -> None:
        """Remember that it is over."""
        self.closed = True

    def shutdown(self) -> bool:
        """Nothing is to be told to anybody."""
        return True


def options_for(machines: Machines) -> list[str]:
    """What torchrun is told about the machines."""
    options = ["--nnodes", str(machines.count)]
    options += ["--max-restarts", str(machines.max_restarts)]
    if machines.address is None:
        options += ["--rdzv-backend", "loopback", "--rdzv-id", "one-machine"]
        return [*options, "--rdzv-endpoint", "127.0.0.1"]  # without it torchrun warns
    host, _, port = machines.address.rpartition(":")
    if machines.rank is not None:
        options += ["--node-rank", str(machines.rank)]
        return [*options, "--master-addr", host, "--master-port", port]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", machines.address]
    options += ["--rdzv-id", os.environ.get("RDZV_ID") or "several-machines"]
    # By itself torchrun tells the others this machine's name, which may lead nowhere
    address = own_address(host, int(port))
    options += ["--local-addr", address] if address else []
    # After the loss of a machine, for its return
    return [*options, "--rdzv-conf", f"join_timeout={machines.join_seconds}"]


def end_at_bad_input(store: Store | None) -> None:
    """Have torchrun end with status 2 when a training process does: no restart.

    Args:
        store: where the other machines are told, which would restart theirs; None
            where there are no others or no restarts.
    """
    monitor = LocalElasticAgent._monitor_workers

    def monitor_workers(agent, group):
        result = monitor(agent, group)
        found = any(failure.exitcode == 2 for failure in result.failures.values())
        if found and store is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone
                store.set(FINAL, "")
        if found or told(store):
            raise SystemExit(2)
        if result.failures and agent._remaining_restarts:
            left = f"{agent._remaining_restarts} of MAX_RESTARTS left"
            say(f"{how_ended(*root_cause(result.failures))}, {left}: starting again")
        return result

    LocalElasticAgent._monitor_workers = monitor_workers


def told(store: Store | None) -> bool:
    """Whether a machine has met bad input."""
    with contextlib.suppress(RuntimeError):
        return store is not None and store.check([FINAL])
    return False


def leave_together(store: Store | None, machines: Machines) -> None:
    """Keep the store, where this machine serves it, until all know; at most 10 s."""
    until = time.monotonic() + 10
    with contextlib.suppress(RuntimeError):
        if told(store):
            store.add(LEFT, 1)
            while serves(machines) and store.add(LEFT, 0) < machines.count:
                if time.monotonic() > until:
                    return
                time.sleep(0.1)


def main(launcher: str, backend: str, arguments: list[str]) -> None:
    """Run one of PyTorch's launchers in this process.

    Args:
        launcher: a name in MODULES.
        backend: device and backend, the same on all machines: "cuda:nccl".
        arguments: `--nproc-per-node N SCRIPT FLAGS`.

    Raises:
        UserError: machines are missing or were started otherwise.
    """
    sys.argv[0] = arguments[2]  # whose name stands before what is said
    machines = machines_from_environment(os.environ)
    if machines.address is None:
        use_loopback()
        rendezvous_handler_registry.register("loopback", LoopbackRendezvous)
        store = None
    else:
        # Else a machine that comes back and those that stayed number their lives
        # differently: https://github.com/pytorch/pytorch/issues/135712
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        facts = {"NNODES": machines.count, "NPROC": int(arguments[1])}
        facts["backend"] = backend
        if machines.rank is not None:
            facts["NODE_RANK"] = machines.rank
        store = meet(TCPStore, machines, facts)
    os.environ["LAUNCHER_PID"] = str(os.getpid())  # see end_with_launcher()
    shared = store if machines.max_restarts else None
    end_at_bad_input(shared)
    status = run(launcher, [*options_for(machines), *arguments], machines, shared)
    leave_together(shared, machines)
    del store  # machine 0 has served it until here
    sys.exit(status)


def run(
    launcher: str, options: list[str], machines: Machines, store: Store | None
) -> int:
    """Run the launcher; returns the exit status, where it would raise a long traceback.

    That is 2 where a machine that shares `store` met bad input, else the one of the
    training process that failed, or 1 where a signal ended the process or the launcher,
    or a machine was lost.
    """
    module = importlib.import_module(MODULES[launcher])
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    logger.addFilter(lambda record: not str(record.msg).startswith(USUAL))
    try:
        module.main(options)
    except SystemExit as ended:  # of end_at_bad_input(), or of torchrun's own options
        return ended.code
    except ChildFailedError as error:
        rank, failure = root_cause(error.failures)
        status = failure.exitcode
        if status not in SAID:
            complain(how_ended(rank, failure))
        return max(status, 1)
    except SignalException as error:
        say(f"{launcher} ended by signal {int(error.sigval)}")
        return 1
    except RendezvousError as error:
        if told(store):
            return 2
        complain(
            f"{socket.gethostname()}: the machines did not all meet at "
            f"{machines.address}: {str(error) or type(error).__name__}"
        )
        return 1
    return 0


def how_ended(rank: int, failure: ProcessFailure) -> str:
    """Name the rank and its exit status or signal."""
    status = failure.exitcode
    how = f"by {failure.signal_name()}" if status < 0 else f"with status {status}"
    return f"rank {rank} on {socket.gethostname()} ended {how}"


def root_cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank that failed by itself.

    Among the others, of which torchrun notes the exit statuses too, are those that lost
    it (1), and those that torchrun ended: by SIGTERM, and 30 seconds later by SIGKILL.
    """
    first = min(failure.timestamp for failure in failures.values())

    def place(item: tuple[int, ProcessFailure]) -> int:
        status = item[1].exitcode
        if status == -signal.SIGTERM or status < 0 and item[1].timestamp > first + 10:
            return 4
        return {2: 1, 1: 2, 130: 3, 143: 3}.get(status, 0)

    return min(failures.items(), key=place)


if __name__ == "__main__":
    with exit_status():
        main(sys.argv[1], sys.argv[2], sys.argv[3:])
