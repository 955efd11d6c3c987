"""What a run on one machine listens at: loopback alone, where its launcher lets us say so.

Runs of all launchers are looked at in test_interruption.py.
"""

import contextlib
import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY, Running, processes_of, wait_until

LISTENS = "0A"  # a state in /proc/net/tcp


def listeners(pids) -> list[tuple[int, str, int]]:
    """(process, address, port) of every TCP socket that these processes listen at."""
    addresses = {}
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS:
                host, port = fields[1].split(":")
                addresses[fields[9]] = readable(host), int(port, 16)
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
                    if match and match[1] in addresses:
                        found.append((pid, *addresses[match[1]]))
    return found


def readable(hexadecimal: str) -> str:
    """An address as /proc has it, in words of the machine's byte order."""
    words = [hexadecimal[at : at + 8] for at in range(0, len(hexadecimal), 8)]
    packed = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, packed)


def test_listeners_are_seen():
    for host in ("127.0.0.1", "0.0.0.0", "::", "::1"):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family) as listener:
            listener.bind((host, 0))
            listener.listen()
            own = listeners([os.getpid()])
            assert (os.getpid(), host, listener.getsockname()[1]) in own


def assert_loopback(job, way):
    """The processes of a run that is under way listen on loopback only."""
    processes, trainers = processes_of(job.run), job.trainers()
    found = listeners(processes)
    launchers = {
        pid
        for pid, (_, command) in processes.items()
        if re.search(r"(^|/)(horovodrun|mpirun) ", command)
    }
    outside = [
        (pid, host, port)
        for pid, host, port in found
        if not host.removeprefix("::ffff:").startswith("127.") and host != "::1"
    ]
    if way == "dataparallel":
        assert not found
    elif way in ("torchrun", "launch", "mp.spawn"):
        assert not outside, [(processes[pid][1], *rest) for pid, *rest in outside]
        assert {pid for pid, *_ in found} & set(trainers), "Gloo listens in them"
    else:
        # The launcher's own, for which it has no setting: see docs/multinode.md
        assert outside and {pid for pid, *_ in outside} <= launchers
        assert not launchers & set(trainers)


@pytest.mark.full
def test_on_one_machine_torchrun_starts_a_killed_process_again(pictures, tmp_path):
    """The second life needs a store of its own, and goes on from the checkpoint."""
    flags = (*TINY, "--epochs", "40", "--checkpoint-steps", "1")
    output = tmp_path / "out"
    with Running("distributed", pictures, output, *flags, MAX_RESTARTS="1") as job:
        wait_until(lambda: len(job.trainers()) == 2, 20, "two training processes")
        os.kill(job.trainers()[0], signal.SIGKILL)
        assert job.end(90) == 0, job.text()
        assert job.text().count("resumed at epoch") == 1, job.text()
    content = torch.load(output / "checkpoint.pt", weights_only=True)
    assert content["epoch"] == 40
