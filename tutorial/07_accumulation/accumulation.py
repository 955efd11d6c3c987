"""Accumulate gradients over four backward passes, with one all-reduce instead of four.

python tutorial/07_accumulation/accumulation.py
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

PASSES = 4


def accumulate(model: DDP, x: Tensor, y: Tensor, divide: bool, no_sync: bool) -> None:
    """Add up the gradients of `PASSES` micro-batches."""
    parts = list(zip(x.chunk(PASSES), y.chunk(PASSES), strict=True))
    for number, (part_x, part_y) in enumerate(parts, start=1):
        last = number == PASSES
        with model.no_sync() if no_sync and not last else nullcontext():
            loss = F.cross_entropy(model(part_x), part_y)  # must be in no_sync() too
            (loss / PASSES if divide else loss).backward()


def build() -> nn.Module:
    """Build a tiny model with the same weights on every call, in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def gradients(model: nn.Module) -> Tensor:
    """Return all gradients as one vector."""
    return torch.cat([w.grad.flatten() for w in model.parameters()])


def main(rank: int, port: int) -> None:
    """Both processes run this function, each with its own shard of one batch."""
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(1)
    x, y = torch.randn(32, 6), torch.randint(3, (32,))
    whole = build()
    F.cross_entropy(whole(x), y).backward()
    right = gradients(whole)  # computed by one process from all 32 samples

    def hook(sent: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sent.append(bucket.buffer().nbytes)
        return allreduce_hook(None, bucket)

    for title, options in {
        "every backward pass averages": {"divide": True, "no_sync": False},
        "no_sync until the last pass": {"divide": True, "no_sync": True},
        "the loss not divided by 4": {"divide": False, "no_sync": True},
    }.items():
        model, sent = DDP(build()), []
        model.register_comm_hook(sent, hook)
        accumulate(model, x[rank::2], y[rank::2], **options)
        error = (gradients(model) - right).abs().max() / right.abs().max()
        verdict = f"off by {100 * error:.0f} %" if error > 1e-6 else "right (to 1e-6)"
        if rank == 0:
            print(f"{title}: all-reduces {len(sent)}, bytes {sum(sent):,}")
            print("  gradients", verdict)
    dist.destroy_process_group()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(main, args=(store.port,), nprocs=2)
