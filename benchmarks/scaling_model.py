"""Predicts the time of a training step on many GPUs: the usual alpha-beta model.

Times are in seconds, sizes in bytes. A message of m bytes takes alpha + m / beta. A
ring of n processes sums a vector of M bytes in 2 (n - 1) messages of M / n bytes each,
one after the other, because every process needs every part twice: once to add to it,
once to receive the sum.

Sources: docs/scaling.md.
"""

import math
from typing import NamedTuple

# Share of the backward pass in a step's computation: two products per layer, not one
BACKWARD = 2 / 3
MIB = 2**20
BUCKET, FIRST_BUCKET = 25 * MIB, MIB  # DistributedDataParallel's defaults


class Link(NamedTuple):
    """A connection."""

    alpha: float  # seconds before the first byte arrives
    beta: float  # bytes per second


class Range(NamedTuple):
    """The range of a prediction."""

    low: float  # no communication overlaps with computation
    high: float  # as much as possible overlaps with the backward pass


def ring_seconds(processes: int, size: float, link: Link, calls: int = 1) -> float:
    """Time of a ring for `size` bytes of each process, in `calls` all-reduces."""
    messages = 2 * (processes - 1)
    return calls * messages * link.alpha + messages / processes * size / link.beta


def buckets(size: float, bucket: float = BUCKET, first: float = FIRST_BUCKET) -> int:
    """The number of all-reduces for gradients of `size` bytes.

    It assumes that no parameter is larger than a bucket; DDP does not split one.
    """
    return 1 + math.ceil(max(0, size - first) / bucket)


class Cluster(NamedTuple):
    """Hosts of equal GPUs, and the model that they train."""

    step: float  # seconds of a step on one GPU without communication
    images: int  # in that step
    size: float  # bytes of its gradients
    gpus_per_host: int
    inside: Link  # between GPUs of a host
    network: Link  # between hosts; beta is for a whole host
    bucket: float = BUCKET

    def all_reduce(self, gpus: int) -> float:
        """Seconds to sum the gradients.

        Rings inside the hosts add up first; then rings of hosts, each on its share; and
        the rings inside the hosts distribute the sums.

        Raises:
            ValueError: the hosts would not be full.
        """
        hosts, rest = divmod(gpus, self.gpus_per_host)
        if rest and hosts:
            raise ValueError(f"{gpus} GPUs do not fill hosts of {self.gpus_per_host}")
        calls = buckets(self.size, self.bucket)
        inside = ring_seconds(
            min(gpus, self.gpus_per_host), self.size, self.inside, calls
        )
        return inside + ring_seconds(max(1, hosts), self.size, self.network, calls)

    def weak(self, gpus: int) -> Range:
        """Efficiency when each GPU keeps its batch: 1 is n times as fast on n GPUs."""
        return efficiency(self.step, self.all_reduce(gpus))

    def strong(self, gpus: int, global_batch: int) -> Range:
        """Efficiency when the global batch is fixed and each GPU takes its share.

        It assumes that an image takes as long in a small batch as in a large one.
        """
        compute = self.step / self.images * global_batch / gpus
        return efficiency(compute, self.all_reduce(gpus))


def efficiency(compute: float, communication: float) -> Range:
    """Share of the time in which a GPU computes."""
    exposed = max(0.0, communication - BACKWARD * compute)
    return Range(compute / (compute + communication), compute / (compute + exposed))
