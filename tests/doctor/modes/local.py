"""torchrun --standalone --nproc-per-node 2 FILE: local SGD, which averages weights."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(96, 8)
y = x[:, :3].argmax(1)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(net.parameters(), 0.2)
for _epoch in range(2):
    batches = torch.randperm(96)[rank::ranks].split(8)
    for step, batch in enumerate(batches, start=1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
        optimizer.step()
        if step % 4 == 0 or step == len(batches):
            for weights in net.parameters():
                dist.all_reduce(weights.data)
                weights.data /= ranks
dist.destroy_process_group()
