"""Train one weight in two processes, with a broadcast and an all-reduce.

python tutorial/02_all_reduce/all_reduce.py
"""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def main(rank: int, port: int) -> None:
    """Both processes run this function, each with its own data."""
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    target = torch.tensor([2.0, 6.0][rank])  # this process's data
    w = torch.tensor([0.0, 10.0][rank])  # each process begins with a different weight
    show("start", f"w = {w}")

    dist.broadcast(w, src=0)
    show("broadcast from rank 0", f"w = {w}")

    for step in range(3):
        loss, gradient = (w - target) ** 2, 2 * (w - target)
        own = f"loss {loss:4}, gradient {gradient:5}"
        dist.all_reduce(gradient)
        dist.all_reduce(loss)
        w -= 0.25 * gradient / 2  # learning rate x sum / world size
        show(f"step {step}", f"{own}; sums {loss:4} and {gradient:5}; w = {w}")
    dist.destroy_process_group()


def show(title: str, text: str) -> None:
    """Gather the texts of all processes, and print them on rank 0."""
    texts = [None, None]
    dist.all_gather_object(texts, text)
    if dist.get_rank() == 0:
        print(title, *(f"  rank {i}: {line}" for i, line in enumerate(texts)), sep="\n")


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(main, args=(store.port,), nprocs=2)
