"""Four processes save a sharded model and its optimizer; two processes load them.

python tutorial/16_sharded/sharded_checkpoint.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

HOST, NAMES = "127.0.0.1", ("replicate", "shard")


def build(*shape: int) -> tuple[nn.Sequential, optim.Adam]:
    """Build a model and its optimizer, sharded over a mesh of this shape."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES[-len(shape) :])
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    return model, optim.Adam(model.parameters())


def save(folder: str) -> tuple[nn.Sequential, optim.Adam]:
    """Train for three steps and save a checkpoint; each process writes its shards."""
    model, optimizer = build(4)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    return model, optimizer


def load(folder: str) -> tuple[nn.Sequential, optim.Adam]:
    """Load the checkpoint into a new model; each process reads its new shards."""
    model, optimizer = build(2)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return model, optimizer


def whole(model: nn.Sequential, optimizer: optim.Adam) -> list[Tensor]:
    """Gather all weights, moments and step counts from all processes."""
    found = list(model.parameters())
    found += [value for w in found for value in optimizer.state[w].values()]
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in found]


def main(rank: int, port: int, processes: int, folder: str) -> None:
    """Save a checkpoint if there are four processes; load it if there are two."""
    store = dist.TCPStore(HOST, port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    torch.manual_seed(processes)
    model, optimizer = save(folder) if processes == 4 else load(folder)
    values, mine = whole(model, optimizer), list(model[0].weight.to_local().shape)
    if rank == 0:
        print(f"{processes} processes: rank 0 has {mine} of the first weight")
    if rank == 0 and processes == 4:
        stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        print("on disk:", [list(p.sizes) for p in stored["model.0.weight"].chunks])
        torch.save(values, f"{folder}/whole.pt")  # only for the comparison
    elif rank == 0:
        equal = sum(map(torch.equal, values, torch.load(f"{folder}/whole.pt")))
        print(f"{equal} of {len(values)} tensors are bitwise equal to the saved ones")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for n in (4, 2):
            store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
            mp.spawn(main, args=(store.port, n, folder), nprocs=n)
