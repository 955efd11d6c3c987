"""Implement a ring all-reduce, and count the bytes that each process sends.

python tutorial/08_collectives/collectives_ring.py
"""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def ring_all_reduce(x: torch.Tensor, rank: int, n: int, look=lambda title: None) -> int:
    """Sum `x` over the first `n` ranks in place; return the bytes sent by this rank."""
    parts, sent = x.chunk(n), 0
    right, left = (rank + 1) % n, (rank - 1) % n
    look("start")
    for step in range(2 * (n - 1)):
        mine, theirs = parts[(rank - step) % n], parts[(rank - step - 1) % n]
        sending, got = dist.isend(mine, right), torch.empty_like(theirs)
        dist.recv(got, left)
        sending.wait()
        sent += mine.nbytes
        if step < n - 1:  # reduce-scatter: add, and send the sum in the next step
            theirs += got
        else:  # all-gather: every process has one complete part and passes it on
            theirs.copy_(got)
        look(f"after step {step + 1}, {'adding' if step < n - 1 else 'replacing'}")
    return sent


def root_all_reduce(x: torch.Tensor, rank: int, n: int) -> int:
    """Sum `x` in place like ring_all_reduce(), but send all data through rank 0."""
    if rank > 0:
        dist.send(x, 0)
        dist.recv(x, 0)
        return x.nbytes
    for other in range(1, n):
        dist.recv(got := torch.empty_like(x), other)
        x += got
    for other in range(1, n):
        dist.send(x, other)
    return x.nbytes * (n - 1)


def main(rank: int, port: int) -> None:
    """Each of the four processes runs this function; only `rank` differs."""
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)

    def look(title: str) -> None:
        rows = [None] * 4 if rank == 0 else None
        dist.gather_object(f"  rank {rank}: {digits.tolist()}", rows)
        if rows:
            print(title, *rows, sep="\n")

    digits = torch.full((4,), 10**rank)  # one digit per rank: 1111 sums all four
    ring_all_reduce(digits, rank, 4, look)

    data = torch.randn(300_000, generator=torch.Generator().manual_seed(rank))
    print_once = print if rank == 0 else lambda *words: None
    print_once(f"bytes sent by the busiest process, for {data.nbytes:,} bytes of data")
    for n in (2, 3, 4):
        group = dist.new_group(range(n))  # the first n processes; all four call this
        if rank >= n:
            continue
        dist.all_reduce(library := data.clone(), group=group)
        sent = torch.zeros(2, dtype=torch.long)
        for i, by_hand in enumerate((ring_all_reduce, root_all_reduce)):
            sent[i] = by_hand(x := data.clone(), rank, n)
            assert torch.allclose(x, library, atol=1e-5)
        dist.all_reduce(sent, dist.ReduceOp.MAX, group)
        print_once(f"  {n} processes: {sent[0]:,} in a ring, {sent[1]:,} via rank 0")
    dist.destroy_process_group()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(main, args=(store.port,), nprocs=4)
