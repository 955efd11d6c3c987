"""DDP by hand, first version: all-reduce every gradient after the backward pass.

python tutorial/05_build_ddp/build_ddp_naive.py    # prints times to stderr
"""

import copy
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

PROCESSES, STEPS, LAYERS, WIDTH = 2, 50, 20, 128


class OurDDP(nn.Sequential):
    """A model whose gradients are averaged over all processes."""

    def __init__(self, model: nn.Module):
        super().__init__(model)  # forward() runs the model
        self.all_reduces = 0
        for weight in model.parameters():
            dist.broadcast(weight.data, src=0)

    def finish(self) -> None:
        """Average the gradients; call this between backward() and step()."""
        for weight in self.parameters():
            dist.all_reduce(weight.grad)
            self.all_reduces += 1
            weight.grad /= PROCESSES


def main(rank: int, port: int) -> None:
    """All processes run this function, each with its own weights and samples."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    torch.manual_seed(rank)
    pairs = [(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(LAYERS)]
    model = nn.Sequential(*(layer for pair in pairs for layer in pair))
    x, y = torch.randn(2, 32, WIDTH)
    models, times = [OurDDP(copy.deepcopy(model)), DDP(model)], []
    for model in STEPS * models:  # alternate between our DDP and PyTorch's
        dist.barrier()
        began = time.perf_counter()
        model.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        if isinstance(model, OurDDP):
            model.finish()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        times.append(1000 * (time.perf_counter() - began))
    ours, torchs = (nn.utils.parameters_to_vector(m.parameters()) for m in models)
    off = (ours - torchs).abs().max().item()
    if rank == 0:
        print("all-reduces per step:", models[0].all_reduces // STEPS)
        print("weights:", "bitwise equal" if off == 0 else f"off by {off:.4f}")
        ours, torchs = torch.tensor(times).view(STEPS, 2).median(0).values
        print(f"{sys.argv[0]}: {ours:.1f} ms, torch's {torchs:.1f} ms", file=sys.stderr)
    dist.destroy_process_group()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(main, args=(store.port,), nprocs=PROCESSES)
