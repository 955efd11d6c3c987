"""The machines of a job: how many, where they meet, over which network."""

import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from common.errors import UserError, complain

LOOPBACK = "lo"


class Machines(NamedTuple):
    """The machines of a job, as the environment describes them."""

    count: int = 1
    rank: int | None = None  # of this machine; None if the rendezvous numbers them
    host: str | None = None  # where they meet; None on a single machine
    port: int = 0
    max_restarts: int = 0
    join_seconds: int = 45  # how long a machine waits for the others

    @property
    def serves(self) -> bool:
        """Whether this machine is the one that listens at the common address."""
        return self.rank == 0 or self.rank is None and belongs_here(self.host)


def machines_from_environment(environment: Mapping[str, str]) -> Machines:
    """Read NNODES and the variables that belong to it.

    Raises:
        UserError: a value is missing, is not a number, or contradicts another.
    """

    def number(name: str, default: int, smallest: int) -> int:
        text = environment.get(name) or str(default)
        if not text.isdecimal() or int(text) < smallest:
            raise UserError(f"{name}={text} is not a whole number from {smallest} up")
        return int(text)

    count, restarts = number("NNODES", 1, 1), number("MAX_RESTARTS", 0, 0)
    seconds = number("JOIN_SECONDS", 45, 1)
    endpoint, host = environment.get("RDZV_ENDPOINT"), environment.get("MASTER_ADDR")
    rank = number("NODE_RANK", 0, 0) if environment.get("NODE_RANK") else None
    if rank is not None and rank >= count:
        raise UserError(f"NODE_RANK={rank} has to be below NNODES={count}")
    if count == 1:
        if endpoint and not environment.get("NNODES"):
            raise UserError(f"RDZV_ENDPOINT={endpoint} needs NNODES=N too")
        return Machines(max_restarts=restarts, join_seconds=seconds)
    if bool(endpoint) == (rank is not None) or not (endpoint or host):
        raise UserError(
            f"NNODES={count} needs either RDZV_ENDPOINT=HOST:PORT, the same on all "
            "machines, or NODE_RANK and MASTER_ADDR, the host of NODE_RANK=0"
        )
    if endpoint:
        host, port = host_and_port(endpoint, f"RDZV_ENDPOINT={endpoint}", 29400)
    else:
        port = number("MASTER_PORT", 29500, 1)
        if restarts:
            raise UserError("MAX_RESTARTS on several machines needs RDZV_ENDPOINT")
    return Machines(count, rank, host, port, restarts, seconds)


def host_and_port(
    text: str, setting: str, default: int | None = None
) -> tuple[str, int]:
    """Read HOST:PORT, or HOST if there is a default; `setting` is for the error."""
    host, colon, port = text.rpartition(":")
    if not colon and default:
        return text, default
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"{setting} is not of the form HOST:PORT")
    return host, int(port)


def use_loopback() -> None:
    """Make Gloo and NCCL listen only on loopback, unless their variables are set.

    By default Gloo uses the host name's interface, and NCCL any except loopback:
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
    """
    if Path("/sys/class/net", LOOPBACK).exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={LOOPBACK}")


def own_address(host: str, port: int) -> str | None:
    """The address of this machine on the network over which it reaches `host`.

    None if it is loopback or unknown.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return None
    return None if own.startswith("127.") or own == "::1" else own


def check_own_address() -> None:
    """Check that others can reach this machine by its host name, which Gloo sends them.

    Debian's installer makes that name resolve to loopback.
    """
    name = socket.gethostname()
    if "GLOO_SOCKET_IFNAME" not in os.environ and own_address(name, 1) is None:
        raise UserError(
            f"the host name {name} leads to loopback or nowhere, where other machines "
            "cannot reach this one: set INTERFACE to the network between them, for "
            "example INTERFACE=eth0 (ip -brief addr lists them)"
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


def reach(host: str, port: int, seconds: int) -> None:
    """Wait until something listens at a port; end this process if nothing does."""
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                me, why = socket.gethostname(), error.strerror or error
                complain(f"{me} could not reach {host}:{port} in {seconds} s: {why}")
                sys.exit(1)
        time.sleep(0.2)
