"""Batch norm sees only one shard; all-reduce its statistics, as SyncBatchNorm does.

python tutorial/07_accumulation/accumulation_batch_norm.py
"""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def main(rank: int, port: int) -> None:
    """Both processes run this function, each with its own shard of one batch."""
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    x = torch.tensor([1.0, 3.0, 5.0, 7.0, 2.0, 4.0, 6.0, 20.0])
    mine = x[:4] if rank == 0 else x[4:]

    show(f"my shard: mean {mine.mean():5.2f}, variance {mine.var(correction=0):5.2f}")

    sums = torch.stack((mine.sum(), mine.square().sum(), torch.tensor(4.0)))
    dist.all_reduce(sums)
    mean = sums[0] / sums[2]
    variance = sums[1] / sums[2] - mean**2

    show(f"all-reduced: mean {mean:5.2f}, variance {variance:5.2f}")
    if rank == 0:
        print(f"whole batch: mean {x.mean():5.2f}, variance {x.var(correction=0):5.2f}")

    part = mine.chunk(2)[0]  # accumulation: batch norm sees one micro-batch at a time
    show(
        f"micro-batch: mean {part.mean():5.2f}, variance {part.var(correction=0):5.2f}"
    )

    try:
        nn.SyncBatchNorm(1)(mine[:, None])
    except ValueError as error:
        show(f"nn.SyncBatchNorm on a CPU: {type(error).__name__}")
    dist.destroy_process_group()


def show(line: str) -> None:
    """Gather both processes' lines on rank 0, which prints them."""
    lines = [None] * 2 if dist.get_rank() == 0 else None
    dist.gather_object(f"rank {dist.get_rank()}, {line}", lines)
    if lines:
        print(*lines, sep="\n")


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(main, args=(store.port,), nprocs=2)
