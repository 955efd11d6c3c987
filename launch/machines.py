"""The machines of a job: how many, where they meet, and whether they agree."""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch

from common.errors import MissingMachine, UserError, say

LOOPBACK = "lo"


class Machines(NamedTuple):
    """What a launch script is told about the machines of its job."""

    count: int
    rank: int | None  # of this one; None where the rendezvous numbers them
    address: str | None  # HOST:PORT where they meet; None on a single machine
    max_restarts: int
    join_seconds: int  # how long one waits for the others


def machines_from_environment(environment: Mapping[str, str]) -> Machines:
    """Read NNODES and the variables that go with it.

    Args:
        environment: os.environ, or a mapping like it.

    Raises:
        UserError: a value is missing, no number, or contradicts another.
    """
    count = whole_number(environment, "NNODES", 1, 1)
    restarts = whole_number(environment, "MAX_RESTARTS", 0, 0)
    seconds = join_seconds(environment)
    rank = None
    if environment.get("NODE_RANK"):
        rank = whole_number(environment, "NODE_RANK", 0, 0)
    endpoint = environment.get("RDZV_ENDPOINT")
    if rank is not None and rank >= count:
        raise UserError(f"NODE_RANK={rank} has to be below NNODES={count}")
    if count == 1:
        if endpoint and not environment.get("NNODES"):
            raise UserError(f"RDZV_ENDPOINT={endpoint} needs NNODES=N too")
        return Machines(1, 0, None, restarts, seconds)
    if bool(endpoint) == (rank is not None):
        raise UserError(
            f"NNODES={count} needs either RDZV_ENDPOINT=HOST:PORT, the same on all "
            "machines, or NODE_RANK and MASTER_ADDR, the host of NODE_RANK=0"
        )
    if endpoint:
        host, _, port = (
            endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", "29400")
        )
        said = f"RDZV_ENDPOINT={endpoint}"
    else:
        host = environment.get("MASTER_ADDR", "")
        port = str(whole_number(environment, "MASTER_PORT", 29500, 1))
        said = f"MASTER_ADDR={host} with MASTER_PORT={port}"
        if restarts:
            raise UserError("MAX_RESTARTS on several machines needs RDZV_ENDPOINT")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"{said} is no HOST:PORT to meet at")
    return Machines(count, rank, f"{host}:{port}", restarts, seconds)


def join_seconds(environment: Mapping[str, str]) -> int:
    """How long a machine waits for the others: JOIN_SECONDS.

    Raises:
        UserError: it is no number.
    """
    return whole_number(environment, "JOIN_SECONDS", 45, 1)


def whole_number(
    environment: Mapping[str, str], name: str, default: int, smallest: int
) -> int:
    """The value of a variable, or `default` where it is not set or empty.

    Raises:
        UserError: it is no whole number, or below `smallest`.
    """
    text = environment.get(name) or str(default)
    if not text.isdecimal() or int(text) < smallest:
        raise UserError(f"{name}={text} is no whole number from {smallest} on")
    return int(text)


def slots_of_hosts(hosts: str) -> dict[str, int]:
    """Read "a:4,b:4": the number of processes of each host.

    Raises:
        UserError: it is not of that form.
    """
    slots = {}
    for part in hosts.split(","):
        host, _, count = part.strip().rpartition(":")
        if not host or not count.isdecimal() or not int(count) or host in slots:
            raise UserError(f"HOSTS={hosts} is not of the form a:4,b:4")
        slots[host] = int(count)
    return slots


def use_loopback() -> None:
    """Have Gloo and NCCL listen on loopback alone, unless told otherwise.

    By themselves they take the interface that the host name leads to, or any but
    loopback:
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
    """
    if Path("/sys/class/net", LOOPBACK).exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={LOOPBACK}")


def own_address(host: str, port: int) -> str | None:
    """The address of this machine on the network over which it reaches another.

    Args:
        host: the other one, or this machine itself.
        port: any; nothing is sent.

    Returns:
        None where it is loopback, as of a host name that leads there, or unknown.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            own = probe.getsockname()[0]
    except OSError:
        return None
    return None if own.startswith("127.") or own == "::1" else own


def check_own_address() -> None:
    """See that others can reach this machine by its own name, which Gloo tells them.

    Raises:
        UserError: the name leads to loopback, as Debian's installer has it.
    """
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "nowhere"
    known = not address.startswith(("127.", "nowhere"))
    if not known and "GLOO_SOCKET_IFNAME" not in os.environ:
        raise UserError(
            f"the host name {name} leads to {address}, where other machines cannot "
            "reach this one: set INTERFACE to the network that joins them, for example "
            "INTERFACE=eth0 (ip -brief addr lists them)"
        )


def belongs_here(host: str) -> bool:
    """Whether a host name or address is this machine's."""
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def meet(
    make_store: Callable[..., Any], machines: Machines, facts: Mapping[str, Any]
) -> Any:
    """Wait until all machines are there, and see that they were started alike.

    Args:
        make_store: torch.distributed.TCPStore. Machine 0 serves it, or, where they
            have no numbers yet, the one that the address belongs to.
        machines: how many, and where they meet.
        facts: what has to be the same on all machines, by the name it is set with;
            "NODE_RANK" has to differ.

    Returns:
        the store, in which torchrun goes on.

    Raises:
        UserError: a machine was started otherwise.
        MissingMachine: a machine is missing, or cannot be reached.
    """
    until = time.monotonic() + machines.join_seconds
    while True:
        store = _open(make_store, machines, until)
        try:
            _wait_for_all(store, machines, facts, until)
            return store
        except RuntimeError as error:  # the store of an earlier run, which was ending
            if time.monotonic() > until:
                raise MissingMachine(
                    f"{socket.gethostname()} lost {machines.address} while the "
                    f"machines met: {str(error).splitlines()[0]}"
                ) from None
        del store
        time.sleep(0.5)


def _wait_for_all(
    store: Any, machines: Machines, facts: Mapping[str, Any], until: float
) -> None:
    """Tell the others of this machine, until all are there; see meet()."""
    key = f"machines of {Path(sys.argv[0]).name}"  # a preflight meets before it
    facts = {"PyTorch": torch.__version__, **facts}
    store.append(key, json.dumps([socket.gethostname(), facts]) + "\n")
    told = False
    while True:
        present = [json.loads(line) for line in store.get(key).splitlines()]
        problem = _difference(present)
        if problem:
            time.sleep(2)  # for the others to read the same
            raise UserError(problem)
        if len(present) >= machines.count:
            return
        names = ", ".join(name for name, _ in present)
        if time.monotonic() > until:
            raise MissingMachine(
                f"{len(present)} of {machines.count} machines came to "
                f"{machines.address} within {machines.join_seconds} s "
                f"(JOIN_SECONDS): {names}{_missing(present, machines.count)}"
            )
        if not told and time.monotonic() > until - machines.join_seconds + 5:
            told = True
            say(f"waiting at {machines.address} for more machines than {names}")
        time.sleep(0.1)


def serves(machines: Machines) -> bool:
    """Whether this machine is the one that listens at the common address."""
    if machines.rank is None:
        return belongs_here(machines.address.rpartition(":")[0])
    return machines.rank == 0


def _open(make_store: Callable[..., Any], machines: Machines, until: float) -> Any:
    """Listen at the common address, or connect to it once somebody does."""
    host, _, port = machines.address.rpartition(":")
    options = {
        "timeout": timedelta(seconds=machines.join_seconds),
        "multi_tenant": True,  # torchrun, in this process, opens the same again
        "wait_for_workers": False,
    }
    if serves(machines):
        check_port(int(port), machines.address)
    else:
        _reach(host, int(port), until, machines)
    made = []

    def make() -> None:
        try:
            made.append(
                make_store(host, int(port), is_master=serves(machines), **options)
            )
        except RuntimeError as error:
            made.append(error)

    # The store's own timeout does not end its wait for a program that is no store
    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(max(1, until - time.monotonic()))
    if not made:
        raise UserError(
            f"{socket.gethostname()} reached {machines.address}, where nothing "
            f"answered as machine 0 does within {machines.join_seconds} s "
            "(JOIN_SECONDS): is it another program's port?"
        )
    if isinstance(made[0], RuntimeError):
        raise MissingMachine(
            f"{socket.gethostname()} cannot reach {machines.address}: "
            f"{str(made[0]).splitlines()[0]}"
        )
    return made[0]


def _reach(host: str, port: int, until: float, machines: Machines) -> None:
    """Wait until the machine that serves listens."""
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise MissingMachine(
                    f"{socket.gethostname()} could not reach {machines.address} within "
                    f"{machines.join_seconds} s (JOIN_SECONDS): "
                    f"{error.strerror or error}"
                ) from None
        time.sleep(0.2)


def _difference(present: list[tuple[str, dict]]) -> str | None:
    """Say what two machines disagree about, in one line; None where they agree."""
    first, facts = present[0]
    for number, (other, others) in enumerate(present):
        for name in facts:
            if name != "NODE_RANK" and facts[name] != others.get(name):
                return (
                    f"{name} differs: {facts[name]} on {first}, "
                    f"{others.get(name)} on {other}"
                )
        for earlier, theirs in present[:number]:
            if others.get("NODE_RANK", number) == theirs.get("NODE_RANK"):
                return f"NODE_RANK={others['NODE_RANK']} on {earlier} and on {other}"
    return None


def _missing(present: list[tuple[str, dict]], count: int) -> str:
    """The numbers of the machines that did not come, where they have numbers."""
    numbers = {facts["NODE_RANK"] for _, facts in present if "NODE_RANK" in facts}
    missing = ", ".join(str(n) for n in range(count) if n not in numbers)
    return f"; NODE_RANK {missing} missing" if numbers else ""


def check_address(url: str, node_rank: int) -> tuple[str, int]:
    """Host and port of tcp://HOST:PORT.

    Raises:
        UserError: it is not of that form; or rank 0 is to listen on this machine, and
            the port is taken.
    """
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or not port:
        raise UserError(f"--dist-url {url} is not of the form tcp://HOST:PORT")
    if node_rank == 0:
        check_port(port, f"--dist-url {url}")
    return parts.hostname, port


def check_port(port: int, setting: str) -> None:
    """See that this machine can listen on a port.

    Raises:
        UserError: it is taken; the text begins with `setting`.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            raise UserError(
                f"{setting}: {error.strerror}; choose another port"
            ) from None
