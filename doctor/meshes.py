"""Detect networks that are divided between ranks, which then read the same samples."""

import re

from .event import Event
from .job import Job
from .law import Doubt
from .record import recorder, wrap
from .watcher import Watcher

DATA = re.compile("d.?p|data|rep|shard|batch|rank", re.I)  # names of dimensions


class Divided(Event, limit=1):
    """The script divides a network between ranks, not only samples."""

    how: str


class Meshes(Watcher):
    """Detects device meshes and tensor parallelism."""

    def hooks(self) -> None:
        import torch.distributed.device_mesh as meshes
        import torch.distributed.tensor.parallel as parallel

        wrap(meshes.DeviceMesh, "__init__", self.mesh)
        for owner in (parallel, parallel.api):
            wrap(owner, "parallelize_module", self.parallel)

    def mesh(self, call, own, *args, **kwargs):
        call(own, *args, **kwargs)
        names = own.mesh_dim_names or ()
        if own.ndim > 1 or (names and not DATA.search(" ".join(names))):
            named = f" ({', '.join(names)})" * bool(names)
            how = f"a device mesh of {own.ndim} dimensions{named}"
            recorder.write(Divided(how=how))

    def parallel(self, call, *args, **kwargs):
        recorder.write(Divided(how="parallelize_module()"))
        return call(*args, **kwargs)


def undivided(job: Job) -> None:
    """Raise Doubt if a network is divided between ranks."""
    for one in job.of(Divided)[:1]:
        raise Doubt(f"{one.how} may divide the network between ranks")
