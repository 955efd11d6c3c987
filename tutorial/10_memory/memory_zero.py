"""Implement ZeRO by hand: two processes divide the tensors that DDP replicates.

python tutorial/10_memory/memory_zero.py [FILE.json]    # saves the bytes for a figure
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

LAYERS, WIDTH, STEPS = 4, 128, 3


def gather(half: Tensor) -> Tensor:
    """Join the two processes' halves of a matrix; return the whole matrix."""
    whole = torch.empty(WIDTH, WIDTH)
    dist.all_gather_into_tensor(whole, half)
    return whole


def train(stage: int, rank: int) -> tuple[Tensor, dict[str, int]]:
    """Train with ZeRO (stage 0: DDP); return the weights and the bytes of each kind."""
    torch.manual_seed(0)
    batch = torch.randn(2, 8, WIDTH)[rank]  # each process has its own eight samples
    weights = [torch.randn(WIDTH, WIDTH) / 10 for _ in range(LAYERS)]
    mine = [w.chunk(2)[rank] if stage else w for w in weights]  # views, not copies
    if stage == 3:
        weights = mine = [half.clone() for half in mine]  # this frees the other halves
    optimizer = torch.optim.Adam(mine)
    for _ in range(STEPS):
        inputs, gradients = [batch], []
        for weight in weights:  # forward
            inputs.append(inputs[-1] @ (gather(weight) if stage == 3 else weight))
        error = inputs.pop()  # the loss is half the sum of the squared outputs
        for weight, part in zip(weights[::-1], mine[::-1], strict=True):  # backward
            gradient = inputs.pop().T @ error
            error = error @ (gather(weight) if stage == 3 else weight).T
            if stage < 2:
                dist.all_reduce(gradient)
            else:  # each process gets the sum of its own rows only
                half = torch.empty(WIDTH // 2, WIDTH)
                dist.reduce_scatter_tensor(half, gradient)
                gradient = half
            gradients.append(gradient.div_(2))  # averaged over both processes
            part.grad = gradient.chunk(2)[rank] if stage == 1 else gradient
        optimizer.step()
        if stage in (1, 2):  # each process has updated its own rows only
            for weight, half in zip(weights, mine, strict=True):
                weight.copy_(gather(half))
    moments = [value for each in optimizer.state.values() for value in each.values()]
    kept = {"weights": weights, "gradients": gradients, "optimizer": moments}
    whole = [gather(weight) if stage == 3 else weight for weight in weights]
    return torch.stack(whole), {k: sum(t.nbytes for t in kept[k]) for k in kept}


def main(rank: int, port: int, file: str | None) -> None:
    """Both processes run this function; rank 0 prints the results."""
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    right, found = train(0, rank)[0], {}
    for stage, name in enumerate(("DDP", "ZeRO 1", "ZeRO 2", "ZeRO 3")):
        weights, found[name] = train(stage, rank)
        if rank == 0:
            off = (weights - right).abs().max().item()
            sizes = ", ".join(f"{k} {n // 1024} KiB" for k, n in found[name].items())
            verdict = f"off by {off:.0e}" if off else "bitwise equal"
            print(f"{name}: {sizes}\n  the weights after training: {verdict}")
    if rank == 0 and file:
        Path(file).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(main, args=(store.port, *(sys.argv[1:] or [None])), nprocs=2)
