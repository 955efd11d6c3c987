"""Show that processes share no variables; start two processes with mp.spawn.

python tutorial/01_ranks/ranks_spawn.py
"""

import torch.distributed as dist
import torch.multiprocessing as mp

visits = []  # every process has its own copy of this list


def main(rank: int, port: int) -> None:
    """Both processes run this function; mp.spawn passes the rank and `args`."""
    store = dist.TCPStore("127.0.0.1", port)  # the two processes rendezvous here
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)

    visits.append(rank)
    lists = [None, None]
    dist.all_gather_object(lists, visits)
    if rank == 0:
        print(f"visits in rank 0: {lists[0]}")
        print(f"visits in rank 1: {lists[1]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(main, args=(store.port,), nprocs=2)
    print(f"visits in the parent process: {visits}")
