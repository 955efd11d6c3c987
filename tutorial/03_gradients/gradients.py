"""Is the average of the shards' gradients equal to the gradient of the whole batch?

python tutorial/03_gradients/gradients.py
"""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def build(norm: type[nn.Module] = nn.Identity) -> nn.Module:
    """Build a tiny model with the same weights on every call, in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), norm(8), nn.Tanh(), nn.Linear(8, 3))


def gradients(model: nn.Module, x: Tensor, y: Tensor, factor: float = 1.0) -> Tensor:
    """Backpropagate the mean loss times `factor`; return all gradients as a vector."""
    loss = F.cross_entropy(model(x), y)
    (factor * loss).backward()
    return torch.cat([w.grad.flatten() for w in model.parameters()])


def report(title: str, found: Tensor, right: Tensor) -> None:
    """Print the largest error relative to the largest gradient."""
    error = ((found - right).abs().max() / right.abs().max()).item()
    verdict = f"off by {100 * error:.2f} %" if error > 1e-6 else "equal (to 1e-6)"
    if dist.get_rank() == 0:
        print(f"{title:43} {verdict}")


def main(rank: int, port: int) -> None:
    """Both processes run this function, each with its own shard of one batch."""
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(1)
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    my_x, my_y = x[rank::2], y[rank::2]  # four samples each
    right = gradients(build(), x, y)  # one process, all eight samples

    mine = gradients(build(), my_x, my_y)
    report("my own shard", mine, right)
    total = mine.clone()
    dist.all_reduce(total)
    report("all-reduced: the sum", total, right)
    report("all-reduced and divided by two: the mean", total / 2, right)
    report("DDP", gradients(DDP(build()), my_x, my_y), right)

    six_or_two = slice(0, 6) if rank == 0 else slice(6, 8)
    few_x, few_y = x[six_or_two], y[six_or_two]
    report("DDP, shards of six and two", gradients(DDP(build()), few_x, few_y), right)
    weighted = gradients(DDP(build()), few_x, few_y, factor=len(few_x) / 4)
    report("  with each loss times shard size / 4", weighted, right)

    with_norm = gradients(build(nn.BatchNorm1d), x, y)
    shards = gradients(DDP(build(nn.BatchNorm1d)), my_x, my_y)
    report("DDP, a model with batch norm", shards, with_norm)
    dist.destroy_process_group()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(main, args=(store.port,), nprocs=2)
