"""torchrun --standalone --nproc-per-node 2 FILE: torch.compile over DDP."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
y = x[:, :3].argmax(1)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
model = torch.compile(DDP(net))  # DDP copies rank 0's weights
optimizer = torch.optim.Adam(net.parameters(), 0.02)
for epoch in range(2):
    order = torch.randperm(96, generator=torch.Generator().manual_seed(epoch))
    for batch in order[rank::ranks].split(8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
if rank == 0:
    torch.save(net.state_dict(), "weights.pt")
dist.destroy_process_group()
