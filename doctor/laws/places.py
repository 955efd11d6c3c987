"""Law 9: all ranks meet. Ports and files that processes share."""

import os
import sys
from dataclasses import dataclass

from ..event import Event, Failed
from ..law import RISK, WRONG, Breach, check, need
from ..record import place, recorder, wrap
from ..watcher import Watcher
from .meeting import EFFECTS, LAW, batch_counts_differ, collectives_differ, errors

SPAWNED = "spawn_main" in str(sys.orig_argv)  # its parent may have chosen the port
PORT = "" if SPAWNED else os.environ.get("MASTER_PORT", "")


@dataclass(kw_only=True)
class Port(Event):
    """The script joins a process group."""

    own: int  # the port, if it is not the launcher's
    place: str


class Places(Watcher):
    """Records ports."""

    def hooks(self) -> None:
        import torch.distributed as dist

        for owner in (dist, dist.distributed_c10d):
            wrap(owner, "init_process_group", self.join)

    def join(self, call, *args, **kwargs):
        method = kwargs.get("init_method") or (args[1:] or [None])[0]
        port = str(method or "").rpartition(":")[2]
        port = port if port.isdigit() else os.environ.get("MASTER_PORT", "")
        own = int(port) if port != PORT and port.isdigit() else 0
        recorder.write(Port(own=own, place=place()))
        return call(*args, **kwargs)


EFFECTS = *EFFECTS, collectives_differ, batch_counts_differ


@check(LAW, WRONG, effects=EFFECTS, read="docs/pitfalls.md, number 13")
def file_race(job):
    """A process reads a file before another one has written it.

    Make the other ranks wait in a barrier until rank 0 has written the file.
    """
    failed = {one.rank for one in job.of(Failed)}
    for one in errors(job)[:1]:
        if "FileNotFound" in one.text and one.path:
            # Rank 0 may have been stopped before it wrote the file
            if os.path.exists(one.path) or 0 not in failed:
                what = f"rank {one.rank} cannot find {os.path.relpath(one.path)}, "
                what += "which another process "
                yield Breach(f"{what}writes, or was about to write", one.place)


@check(LAW, RISK, needs=[Port], read="docs/pitfalls.md, number 3")
def own_port(job):
    """The processes meet at a port that the script has fixed.

    Omit init_method, rank and world_size, so that the launcher's port is used.
    Not a mistake if: you never run a second job on this machine.
    """
    for one in job.of(Port):
        if 0 < one.own < 32768:  # the system picks free ports above
            what = f"the port is always {one.own}: a second job on this machine fails, "
            yield Breach(f"{what}or joins this one", one.place)
            return
        need(not one.own, "the script chose a port, which may be a free one")
