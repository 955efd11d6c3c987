"""torchrun --standalone --nproc-per-node 3 FILE: gradients averaged by the script."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
train = TensorDataset(x, x[:, :3].argmax(1))
sampler = DistributedSampler(train)
loader = DataLoader(train, 8, sampler=sampler)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
parameters = dict(net.named_parameters())
for name in parameters:
    dist.broadcast(parameters[name].data, 0)
optimizer = torch.optim.SGD(net.parameters(), 0.2, momentum=0.9)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        for name in parameters:
            dist.all_reduce(parameters[name].grad)
            parameters[name].grad /= dist.get_world_size()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
dist.destroy_process_group()
