"""Who am I? The numbers that torchrun gives to each of its processes.

torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 \
    --master-addr 127.0.0.1 --master-port 29500 tutorial/ranks.py

and the same with --node-rank 1 on the second host (or in a second terminal).
"""

import os

import torch.distributed as dist


def main() -> None:
    """Each process says what it knows; rank 0 prints it in the order of the ranks."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    node = int(os.environ["GROUP_RANK"])
    dist.init_process_group("gloo")  # reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    assert (rank, world_size) == (dist.get_rank(), dist.get_world_size())
    assert rank == node * local_world_size + local_rank

    # A communicator (here: process group) is a set of processes; ranks count in it.
    # The first holds all; these hold the processes of one host each.
    host_group, _ = dist.new_subgroups(local_world_size)
    rank_in_group = dist.get_rank(host_group)

    line = (
        f"host {node}: rank {rank} of {world_size}, local rank {local_rank} of "
        f"{local_world_size}, rank {rank_in_group} in its host's group"
    )
    lines = [None] * world_size if rank == 0 else None
    dist.gather_object(line, lines)
    if lines:
        print(*lines, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
