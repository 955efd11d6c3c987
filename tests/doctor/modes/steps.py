"""torchrun --standalone --nproc-per-node 2 FILE: steps that the network slows down."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.randn(1344, 3, 24, 24)
data = TensorDataset(x, x.mean((2, 3)).argmax(1))
train, val = Subset(data, range(1280)), Subset(data, range(1280 + rank, 1344, 2))
sampler = DistributedSampler(train)
loader, val_loader = DataLoader(train, 16, sampler=sampler), DataLoader(val, 16)
layers = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU()]
blocks = [one for _ in range(20) for one in (nn.Conv2d(32, 32, 1), nn.ReLU())]
head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3)
net = nn.Sequential(*layers, *blocks, *head)
model = DDP(net)
optimizer = torch.optim.SGD(net.parameters(), 0.01)


def validate():
    """The share of correct predictions, over all processes."""
    net.eval()
    with torch.no_grad():
        right = sum((net(a).argmax(1) == b).sum() for a, b in val_loader)
    dist.all_reduce(right)
    net.train()
    return right.item() / 64


for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}")
    accuracy = validate()
    if rank == 0:
        print(f"accuracy {accuracy:.4f}")
dist.destroy_process_group()
