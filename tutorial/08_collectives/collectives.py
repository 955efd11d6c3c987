"""Print what four processes hold before and after each of eight operations.

python tutorial/08_collectives/collectives.py
"""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def main(rank: int, port: int) -> None:
    """Each of the four processes runs this function; only `rank` differs."""
    store = dist.TCPStore("127.0.0.1", port)  # the four processes rendezvous here
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    root = rank == 0
    one = torch.tensor([rank + 1])
    four = 10 * rank + torch.arange(4)  # rank 0: [0, 1, 2, 3], rank 1: [10, 11, ...

    x = one.clone()
    dist.reduce(x, dst=0)
    show("reduce: rank 0 gets the sum", one, x if root else "undefined")

    x = torch.zeros_like(one)
    dist.scatter(x, list(four.split(1)) if root else None, src=0)
    show("scatter: rank 0 gives each process one part", four if root else "nothing", x)

    parts = [torch.zeros_like(one) for _ in four] if root else None
    dist.gather(one, parts, dst=0)
    x = torch.cat(parts) if root else "nothing"
    show("gather: rank 0 collects all parts", one, x)

    x = torch.zeros_like(four)
    dist.all_gather_into_tensor(x, one)
    show("all-gather: every process collects all parts", one, x)

    part = torch.zeros_like(one)
    dist.reduce_scatter_tensor(part, four)
    show("reduce-scatter: every process gets one part of the sum", four, part)

    x = torch.zeros_like(four)
    dist.all_to_all_single(x, four)
    show("all-to-all: every process gives each process one part", four, x)

    x = four.clone()
    if rank == 0:
        dist.send(x, dst=3)
    if rank == 3:
        dist.recv(x, src=0)
    show("send and recv: rank 0 sends, rank 3 receives", four, x)

    store.add("arrived", 1)  # other processes may arrive earlier or later
    dist.barrier()
    arrived = store.add("arrived", 0)
    show("barrier: nobody continues until everybody has arrived", "unknown", arrived)
    dist.destroy_process_group()


def show(title: str, before: object, after: object) -> None:
    """Gather every process's values on rank 0, which prints them."""
    texts = [x.tolist() if isinstance(x, torch.Tensor) else x for x in (before, after)]
    rows = [None] * 4 if dist.get_rank() == 0 else None
    row = f"  rank {dist.get_rank()}: {str(texts[0]):16} -> {texts[1]}"
    dist.gather_object(row, rows)
    if rows:
        print(title, *rows, sep="\n")


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(main, args=(store.port,), nprocs=4)
