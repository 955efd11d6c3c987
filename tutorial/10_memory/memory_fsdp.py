"""Compare FSDP2 with DDP: the weights after training, and the memory per process.

python tutorial/10_memory/memory_fsdp.py
"""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

LAYERS, WIDTH, STEPS = 4, 128, 3


def build() -> nn.Sequential:
    """Build a small model with the same weights on every call, in every process."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def shard(model: nn.Sequential, reshard: bool) -> nn.Sequential:
    """Give each process half of the rows of every weight and bias."""
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:  # layers first: each one gets its own all-gather
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)  # then the rest


def train(name: str, model: nn.Module, batch: Tensor) -> Tensor:
    """Train with Adam, print the memory that rank 0 keeps, and return all weights."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    halved = []  # how many layers are sharded when each layer starts
    for layer in layers:
        layer.register_forward_pre_hook(
            lambda *_: halved.append(sum(isinstance(m.weight, DTensor) for m in layers))
        )
    optimizer = torch.optim.Adam(model.parameters())  # holds halves if sharded
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    weights = list(model.parameters())
    moments = [value for each in optimizer.state.values() for value in each.values()]
    kept = {"weights": weights, "gradients": [w.grad for w in weights], "Adam": moments}
    if dist.get_rank() == 0:
        print(f"{name}\n ", ", ".join(f"{k} {kib(t)} KiB" for k, t in kept.items()))
        print("  whole layers when each starts:", [LAYERS - n for n in halved[:LAYERS]])
    full = [w.full_tensor() if isinstance(w, DTensor) else w for w in weights]
    return torch.cat([w.flatten() for w in full])


def kib(tensors: list[Tensor]) -> int:
    """Return the tensors' KiB in this process; count shared memory only once."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    storages = [tensor.untyped_storage() for tensor in local]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values()) // 1024


def main(rank: int, port: int) -> None:
    """Both processes run this function; rank 0 prints the results."""
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    batch = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(1))[rank]
    right = train("DDP", DDP(build(), gradient_as_bucket_view=True), batch)
    for reshard in (True, False):
        model = shard(build(), reshard)
        weights = train(f"fully_shard, reshard_after_forward={reshard}", model, batch)
        off = (weights - right).abs().max().item()
        if rank == 0:
            print("  the weights:", f"off by {off:.0e}" if off else "bitwise equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(main, args=(store.port,), nprocs=2)
