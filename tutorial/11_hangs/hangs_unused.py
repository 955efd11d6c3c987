"""Rank 1 does not use one layer, and fails one step later; meanwhile, rank 0 waits.

python tutorial/11_hangs/hangs_unused.py
"""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoLayers(nn.Module):
    """A model whose second layer runs only on request."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        """Apply the first layer, or both layers, to x (N, 3); return (N, 3)."""
        return self.second(self.first(x)) if both else self.first(x)


def train(rank: int) -> str:
    """Take two steps; return the last thing that this process did, and its error."""
    model = DDP(TwoLayers())
    for step in range(2):
        try:
            part = "forward"
            outputs = model(torch.ones(2, 3), both=rank == 0)
            part = "backward"
            outputs.sum().backward()
        except RuntimeError as error:
            message = str(error).partition(". ")[0]
            lost = "Connection" in message
            return f"step {step}, {part}: {'lost rank 1' if lost else message}"
    return f"step {step}, {part}: done"


def main(rank: int, port: int) -> None:
    """Train in both processes; rank 0 prints the last thing that each of them did."""
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    store.set(str(rank), f"rank {rank}, {train(rank)}")
    dist.destroy_process_group()  # closes the connections, so rank 0 stops waiting
    if rank == 0:
        print(store.get("0").decode(), store.get("1").decode(), sep="\n")


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(main, args=(store.port,), nprocs=2)
