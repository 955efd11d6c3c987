"""The same without a launcher: mp.spawn gives a number, the rest is arithmetic.

MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tutorial/ranks_spawn.py 0

and the same with 1 on the second host (or in a second terminal).
"""

import sys

import torch.distributed as dist
import torch.multiprocessing as mp

HOSTS, PROCESSES_PER_HOST = 2, 4


def main(local_rank: int, node: int) -> None:
    """Each process runs this function; mp.spawn passes its number as the first word."""
    rank = node * PROCESSES_PER_HOST + local_rank
    world_size = HOSTS * PROCESSES_PER_HOST
    dist.init_process_group("gloo", rank=rank, world_size=world_size)

    line = f"host {node}: rank {rank} of {world_size}, local rank {local_rank}"
    lines = [None] * world_size if rank == 0 else None
    dist.gather_object(line, lines)
    if lines:
        print(*lines, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, args=(int(sys.argv[1]),), nprocs=PROCESSES_PER_HOST)
