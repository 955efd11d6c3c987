"""Law 9: all ranks meet. Checks how processes join groups and share files."""

import inspect
import os
import re
import sys

from ..event import Failed, Joins, Rank
from ..job import errors
from ..law import RISK, WRONG, Breach, check
from ..moments import Step
from ..record import place, recorder, torch, wrap
from ..watcher import Watcher
from .meeting import EFFECTS, LAW, batch_counts_differ, collectives_differ

SPAWNED = "spawn_main" in str(sys.orig_argv)  # its parent may have chosen the port
PORT = "" if SPAWNED else os.environ.get("MASTER_PORT", "")


class Places(Watcher):
    """Records the ports and ranks with which processes join groups."""

    def hooks(self) -> None:
        dist = torch.distributed
        for owner in (dist, dist.distributed_c10d, dist.device_mesh):
            wrap(owner, "init_process_group", self.join)

    def join(self, call, *args, **kwargs):
        dist = torch.distributed
        bound = inspect.signature(dist.init_process_group).bind(*args, **kwargs)
        known = {"rank": -1, "world_size": -1, **bound.arguments}
        for name in ("rank", "world_size"):
            if known[name] < 0:
                known[name] = int(os.environ.get(name.upper(), -1))
        url = str(known.get("init_method") or os.environ.get("MASTER_ADDR"))
        local = any(x in url for x in ("localhost", "127.0.0.1", "file:"))
        port = str(known.get("init_method") or "").rpartition(":")[2]
        port = port if port.isdigit() else os.environ.get("MASTER_PORT", "")
        given = re.search(rf"(?<!\d){port}(?!\d)", " ".join(sys.argv[1:]))
        own = int(port) if port.isdigit() and port != PORT and not given else 0
        which = {"number": known["rank"], "world_size": known["world_size"]}
        recorder.write(Joins(own=own, place=place(), local=local, **which))
        return call(*args, **kwargs)


EFFECTS = *EFFECTS, collectives_differ, batch_counts_differ


@check(LAW, WRONG, effects=EFFECTS, read="docs/convert.md")
def file_race(job):
    """A process reads a file before another one has written it.

    Make the other ranks wait in a barrier until rank 0 has written the file.
    """
    failed = {one.rank for one in job.of(Failed)}
    for one in errors(job)[:1]:
        if "FileNotFound" in one.text and one.path:
            # Rank 0 may have ended before it wrote the file
            if os.path.exists(one.path) or 0 not in failed:
                path = os.path.relpath(one.path)
                what = f"rank {one.rank} reads {path} before another rank writes it"
                yield Breach(what, one.place)


@check(LAW, WRONG, needs=[Step], read="pitfall 11")
def no_group(job):
    """The processes never join a process group, so each of them trains alone.

    Call init_process_group() at the start, and wrap the network in DDP.
    """
    if len(job.processes) > 1 and not (job.of(Joins) or job.of(Rank)):
        what = f"none of {len(job.processes)} processes calls init_process_group()"
        yield Breach(what, job.of(Step)[0].place)


@check(LAW, RISK, needs=[Joins], read="pitfall 3")
def own_port(job):
    """The processes meet at a port that the script has fixed.

    Omit init_method, rank and world_size, so that the launcher's port is used. If the
    script starts the processes itself, bind a socket to port 0, and use its port.
    Not a mistake if: you never run a second job on this machine.
    """
    for one in job.of(Joins):
        if 0 < one.own < 32768:  # the system chooses higher ports
            what = f"the port is always {one.own}, also in a second job on this machine"
            yield Breach(what, one.place)
            return
