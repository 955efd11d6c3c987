"""Predict training step times on many GPUs with the standard alpha-beta model.

Times are in seconds, sizes in bytes. A message of m bytes takes alpha + m / beta. A
ring of n processes sums a vector of M bytes in 2 (n - 1) sequential messages of M / n
bytes each, because every part travels around the ring twice: once to add up its values,
once to distribute the sum.

Sources: docs/understand.md.
"""

import math
from typing import NamedTuple

# The backward pass computes two of each layer's three matrix products
BACKWARD = 2 / 3
MIB = 2**20
BUCKET, FIRST_BUCKET = 25 * MIB, MIB  # DistributedDataParallel's defaults


class Link(NamedTuple):
    """A connection between processes."""

    alpha: float  # seconds before the first byte arrives
    beta: float  # bytes per second


class Range(NamedTuple):
    """The lowest and the highest predicted efficiency."""

    low: float  # no communication overlaps with computation
    high: float  # communication overlaps with the backward pass


def ring_seconds(processes: int, size: float, link: Link, calls: int = 1) -> float:
    """Return the time that a ring takes to sum `size` bytes in `calls` all-reduces."""
    messages = 2 * (processes - 1)
    return calls * messages * link.alpha + messages / processes * size / link.beta


def buckets(size: float, bucket: float = BUCKET, first: float = FIRST_BUCKET) -> int:
    """Return how many all-reduces DDP needs for gradients of `size` bytes.

    No parameter may be larger than a bucket, because DDP does not split parameters.
    """
    return 1 + math.ceil(max(0, size - first) / bucket)


class Cluster(NamedTuple):
    """Hosts with identical GPUs, and the model that they train."""

    step: float  # seconds per step on one GPU without communication
    images: int  # in that step
    size: float  # bytes of gradients
    gpus_per_host: int
    inside: Link  # between GPUs on a host
    network: Link  # between hosts; beta is for a whole host
    bucket: float = BUCKET
    pause: float = 0.0  # seconds per epoch without steps: starting loaders, saving
    epoch: int = 1281167  # images per epoch (ImageNet)

    def all_reduce(self, gpus: int) -> float:
        """Return the time, in seconds, to sum the gradients.

        First, a ring inside each host sums the gradients. Then rings across the hosts
        each sum one share. Finally, the rings inside the hosts distribute the sums.

        Raises:
            ValueError: the GPUs do not fill every host.
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
        """Return the efficiency at a fixed batch size per GPU; 1 is perfect scaling."""
        return self.strong(gpus, self.images * gpus)

    def strong(self, gpus: int, global_batch: int) -> Range:
        """Return the efficiency at a fixed global batch size, divided among the GPUs.

        This assumes that the time per image does not depend on the batch size.
        """
        images = global_batch / gpus
        compute, pause = self.step / self.images * images, self.pause * images
        return efficiency(compute, self.all_reduce(gpus), pause / self.epoch, gpus)


def efficiency(compute: float, communication: float, pause: float, gpus: int) -> Range:
    """Return a step's time on one GPU alone, divided by its time on `gpus` GPUs.

    `pause` is the time between epochs, divided by the number of one GPU's steps. n GPUs
    take 1/n of these steps and pause equally long, so n * `pause` is added per step.
    """
    exposed = max(0.0, communication - BACKWARD * compute)
    alone, shared = compute + pause, compute + gpus * pause
    return Range(alone / (shared + communication), alone / (shared + exposed))
