"""What a run on one machine listens at: loopback alone, where its launcher lets us say so.

Runs of all launchers are looked at in test_interruption.py.
"""

import contextlib
import os
import re
import socket
from pathlib import Path

from conftest import processes_of

LISTENS = "0A"  # a state in /proc/net/tcp
# 127.0.0.1, ::ffff:127.0.0.1 and ::1 as /proc has them
LOOPBACK = {"0100007F", f"{'0' * 16}FFFF00000100007F", f"{'0' * 24}01000000"}


def listeners(pids) -> list[tuple[int, str]]:
    """(process, address) of every TCP socket that these processes listen at."""
    addresses = {}
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS:
                addresses[f"socket:[{fields[9]}]"] = fields[1].split(":")[0]
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError, KeyError):
                    found.append((pid, addresses[os.readlink(link)]))
    return found


def test_listeners_are_seen():
    for host, address in {"127.0.0.1": "0100007F", "0.0.0.0": "00000000"}.items():
        with socket.create_server((host, 0)):
            assert (os.getpid(), address) in listeners([os.getpid()])


def assert_loopback(job, way):
    """The processes of a run that is under way listen on loopback only."""
    processes, trainers = processes_of(job.run), job.trainers()
    found = listeners(processes)
    launchers = {
        pid
        for pid, (_, command) in processes.items()
        if re.search(r"(^|/)(horovodrun|mpirun) ", command)
    }
    outside = {pid: processes[pid][1] for pid, host in found if host not in LOOPBACK}
    if way == "dataparallel":
        assert not found
    elif way in ("torchrun", "launch", "mp.spawn"):
        assert not outside
        assert {pid for pid, _ in found} & set(trainers), "Gloo listens in them"
    else:
        # The launcher's own, for which it has no setting: see docs/multinode.md
        assert outside and outside.keys() <= launchers
        assert not launchers & set(trainers)
