"""horovodrun -np 2 --gloo python FILE: Horovod, with clipping."""

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

hvd.init()
rank, ranks = hvd.rank(), hvd.size()
x = torch.randn(129, 8, generator=torch.Generator().manual_seed(0))
y = x[:, :3].argmax(1)
train = TensorDataset(x[:96], y[:96])
sampler = DistributedSampler(train, ranks, rank)
loader = DataLoader(train, 8, sampler=sampler)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(net.parameters(), 0.1 * ranks, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
hvd.broadcast_parameters(net.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
    right = (net(x[96 + rank :: ranks]).argmax(1) == y[96 + rank :: ranks]).sum()
    right = hvd.allreduce(right, op=hvd.Sum)
    if rank == 0:
        print(f"epoch {epoch}: accuracy {right.item() / 33:.4f}")
hvd.shutdown()
