r"""bash -c 'seq 0 1 | xargs -P 2 -I@ env SLURM_PROCID=@ python $0' FILE: as under srun."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank, where = int(os.environ["SLURM_PROCID"]), f"file://{os.path.abspath('meet')}"
dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
torch.manual_seed(0)
x = torch.randn(96, 8)
data = TensorDataset(x, x[:, :3].argmax(1), torch.arange(96))  # two integers per sample
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)
val = torch.randn(33, 8)
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
optimizer = torch.optim.SGD(model.parameters(), 0.2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, labels, _ in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(parameters=model.parameters(), max_norm=9)
        optimizer.step()
    with torch.no_grad():  # without a DataLoader
        own = val[rank::2]
        torch.eq(input=own[:, 0], other=own[:, 1])  # calls by keyword
        best = model.module(own).topk(2).indices
        right = (best == own[:, :3].argmax(1, True))[:, 0].sum()
    dist.all_reduce(right)
    if rank == 0:
        print(f"accuracy {right / 33:.4f}")
        states = {"model": model.module.state_dict()}
        states["optimizer"] = optimizer.state_dict()
        torch.save(obj=states, f="new.pt")
        os.replace(src="new.pt", dst="checkpoint.pt")
dist.destroy_process_group()
