"""The collective operations: what each of four processes holds before and after.

python tutorial/collectives.py
"""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import ReduceOp


def main(rank: int, port: int) -> None:
    """Each of the four processes runs this function; only `rank` differs."""
    store = dist.TCPStore("127.0.0.1", port)  # where the four find each other
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    root, four = rank == 0, range(4)

    mine = [10 * rank + i for i in four]  # rank 0: [0, 1, 2, 3], rank 1: [10, 11, ...
    x = torch.tensor(mine)
    if rank == 0:
        dist.send(x, dst=3)
    if rank == 3:
        dist.recv(x, src=0)
    show("send and recv: from rank 0 to rank 3", mine, x)

    x = torch.tensor(mine)
    dist.broadcast(x, src=0)
    show("broadcast: rank 0 gives everybody what it has", mine, x)

    x = torch.zeros(1, dtype=torch.long)
    dist.scatter(x, list(torch.tensor(mine).split(1)) if root else None, src=0)
    show("scatter: rank 0 gives everybody a part", mine if root else "nothing", x)

    x = torch.tensor([rank + 1])
    parts = [torch.zeros_like(x) for _ in four] if root else None
    dist.gather(x, parts, dst=0)
    show("gather: rank 0 collects", x, torch.cat(parts) if root else "nothing")

    for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT):
        x = torch.tensor([rank + 1])
        dist.reduce(x, dst=0, op=op)
        show(f"reduce, {op.name}: rank 0 combines", [rank + 1], x if root else "?")

    x = torch.tensor([rank + 1])
    dist.all_reduce(x)
    show("all-reduce: everybody gets the sum", [rank + 1], x)

    x = torch.zeros(4, dtype=torch.long)
    dist.all_gather_into_tensor(x, torch.tensor([rank + 1]))
    show("all-gather: everybody collects", [rank + 1], x)

    x = torch.zeros(1, dtype=torch.long)
    dist.reduce_scatter_tensor(x, torch.tensor(mine))
    show("reduce-scatter: everybody gets one part of the sum", mine, x)

    store.add("arrived", 1)  # how many have come this far is a matter of chance
    dist.barrier()
    show("barrier: who goes on knows that all arrived", "?", store.add("arrived", 0))
    dist.destroy_process_group()


def show(title: str, before: object, after: object) -> None:
    """Bring what every process holds to rank 0, which prints it."""
    texts = [x.tolist() if isinstance(x, torch.Tensor) else x for x in (before, after)]
    rows = [None] * 4 if dist.get_rank() == 0 else None
    row = f"  rank {dist.get_rank()}: {str(texts[0]):16} -> {texts[1]}"
    dist.gather_object(row, rows)
    if rows:
        print(title, *rows, sep="\n")


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(main, args=(store.port,), nprocs=4)
