"""Print the numbers that torchrun assigns to each process.

torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 \
    --master-addr 127.0.0.1 --master-port 29500 tutorial/01_ranks/ranks.py

Run the same command with --node-rank 1 on the second host (or in a second terminal).
"""

import os

import torch.distributed as dist


def main() -> None:
    """Every process runs this function with its own rank."""
    host = int(os.environ["GROUP_RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    gpus = int(os.environ["LOCAL_WORLD_SIZE"])  # one process per GPU of this host
    assert rank == host * gpus + local_rank

    gpu = local_rank
    images = list(range(16))[rank::world_size]  # every eighth of 16 images
    line = f"host {host}, rank {rank} of {world_size}, local rank {local_rank}: "
    line += f"cuda:{gpu}" if gpu < gpus else f"cuda:{gpu} does not exist here"

    dist.init_process_group("gloo")  # waits until all processes have called it
    lines = [None] * world_size
    dist.all_gather_object(lines, f"{line}, images {images}")  # ordered by rank
    if rank == 0:
        print(*lines, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
