"""A job's machines: how many there are, their rendezvous and their network."""

import os
import re
import socket
import sys
import time
from typing import NamedTuple

from common.errors import UserError, complain

LOOPBACK = "lo"


class Machines(NamedTuple):
    """A job's machines, as described by the environment."""

    count: int = 1
    rank: int | None = None  # this machine's; None if the rendezvous assigns it
    host: str | None = None  # of the rendezvous; None on a single machine
    port: int = 0
    max_restarts: int = 0
    join_seconds: int = 45  # how long a machine waits for the others
    least: int = 1  # the job continues while this many remain

    @classmethod
    def from_environment(cls) -> "Machines":
        """Read NNODES and related variables; raises UserError if one is invalid."""

        def number(name: str, default: int, smallest: int) -> int:
            text = os.environ.get(name) or str(default)
            if not text.isdecimal() or int(text) < smallest:
                raise UserError(f"{name}={text} is not a whole number >= {smallest}")
            return int(text)

        nodes = os.environ.get("NNODES") or "1"
        if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", nodes):
            raise UserError(f"NNODES={nodes} is not a whole number >= 1, or LEAST:MOST")
        least, count = int(nodes.split(":")[0]), int(nodes.split(":")[-1])
        restarts, seconds = number("MAX_RESTARTS", 0, 0), number("JOIN_SECONDS", 45, 1)
        endpoint, host = map(os.environ.get, ("RDZV_ENDPOINT", "MASTER_ADDR"))
        rank = number("NODE_RANK", 0, 0) if os.environ.get("NODE_RANK") else None
        if rank is not None and rank >= count:
            raise UserError(f"NODE_RANK={rank} must be less than NNODES={count}")
        if least > count:
            raise UserError(f"NNODES={nodes}: LEAST must not be more than MOST")
        if least < count and not (endpoint and restarts):
            needed = "RDZV_ENDPOINT=HOST:PORT, MAX_RESTARTS"
            raise UserError(f"NNODES={nodes} needs {needed}")
        if count == 1:
            if endpoint and not os.environ.get("NNODES"):
                raise UserError(f"RDZV_ENDPOINT={endpoint} also needs NNODES=N")
            return cls(max_restarts=restarts, join_seconds=seconds)
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
        return cls(count, rank, host, port, restarts, seconds, least)

    @property
    def serves(self) -> bool:
        """Whether this machine hosts the rendezvous."""
        return self.rank == 0 or self.rank is None and belongs_here(self.host)


def host_and_port(
    text: str, setting: str, default: int | None = None
) -> tuple[str, int]:
    """Parse HOST:PORT, or HOST if there is a default; a UserError quotes `setting`."""
    host, colon, port = text.rpartition(":")
    if not colon and default:
        return text, default
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"{setting} is not of the form HOST:PORT")
    return host, int(port)


def use_loopback() -> None:
    """Make Gloo and NCCL listen only on loopback, unless their variables are set.

    By default, Gloo uses the host name's interface, and NCCL avoids loopback:
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={LOOPBACK}")


def own_address(host: str, port: int) -> str | None:
    """Return the local address for reaching `host`; None if loopback or unknown."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return None
    return None if own.startswith("127.") or own == "::1" else own


def belongs_here(host: str) -> bool:
    """Whether a host name or address belongs to this machine."""
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def reach(host: str, port: int, seconds: int) -> None:
    """Wait for a server on a port; end this process if none answers in time."""
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
