"""Rank 0 has one more batch than rank 1: show the hang, and three remedies.

python tutorial/18_streams/streams_uneven.py
"""

import re
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

BATCHES, SIZE = (6, 5), 4  # batches of each rank, samples in a batch


def step(model: DDP, batch: Tensor) -> str:
    """Run forward and backward; return the averaged gradient (each rank's own is 1)."""
    model.zero_grad()
    model(batch).mean().backward()
    return f"{model.module.weight.grad.item():.1f}"


def nothing(model: DDP, stream: Iterator[Tensor]) -> Iterator[str]:
    """Train on every batch, without a remedy."""
    for batch in stream:
        yield step(model, batch)


def minimum(model: DDP, stream: Iterator[Tensor]) -> Iterator[str]:
    """Stop where the shortest stream ends; its length is known in advance."""
    for batch in islice(stream, min(BATCHES)):
        yield step(model, batch)


def vote(model: DDP, stream: Iterator[Tensor]) -> Iterator[str]:
    """Before each step, ask whether all ranks have a batch."""
    while True:
        batch = next(stream, None)
        all_have_one = torch.tensor(float(batch is not None))
        dist.all_reduce(all_have_one, dist.ReduceOp.MIN)
        if not all_have_one:
            return
        yield step(model, batch)


def join(model: DDP, stream: Iterator[Tensor]) -> Iterator[str]:
    """Let a rank that has finished take part in the other ranks' all-reduces."""
    with model.join():
        for batch in stream:
            yield step(model, batch)


def main(rank: int, port: int) -> None:
    """Both processes run each remedy; rank 0 prints what both observed."""
    for remedy in (nothing, minimum, vote, join):
        store = dist.PrefixStore(remedy.__name__, dist.TCPStore("127.0.0.1", port))
        timeout = timedelta(seconds=3 + 2 * rank)  # so that rank 0 gives up first
        dist.init_process_group("gloo", None, timeout, 2, rank, store)
        stream = iter([torch.ones(SIZE, 1)] * BATCHES[rank])
        gradients, end = [], "no error"
        try:
            gradients.extend(remedy(DDP(nn.Linear(1, 1, bias=False)), stream))
            dist.barrier()
        except RuntimeError as error:
            end = re.search(r"Timed out \w+ \w+|Connection", str(error))[0] + " ..."
        used = f"{len(gradients) * SIZE} samples, gradients {' '.join(gradients)}"
        store.set(str(rank), f"  rank {rank}: {used}\n    ends: {end}")
        reports = [store.get(key).decode() for key in ("0", "1")]
        if rank == 0:
            print(remedy.__name__, *reports, sep="\n")
        dist.destroy_process_group()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(main, args=(store.port,), nprocs=2)
