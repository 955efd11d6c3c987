"""torchrun --standalone --nproc-per-node 2 FILE: plain DDP that can be resumed."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
dist.all_gather_object([0] * ranks, torch.zeros(rank))  # objects may have any size
torch.manual_seed(0)
x = torch.randn(130, 8)
data = TensorDataset(x, x[:, :3].argmax(1))
train, val = torch.utils.data.random_split(data, [97, 33])
sampler = DistributedSampler(train, drop_last=True)
loader = DataLoader(train, 8, sampler=sampler)
val_loader = DataLoader(val, 8, sampler=range(rank, len(val), ranks))
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
model = DDP(net)
optimizer = torch.optim.AdamW(net.parameters())
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 3 * len(loader))
torch.manual_seed(rank)  # different dropout in each process
saved, first = {"model": net, "optimizer": optimizer, "scheduler": scheduler}, 0
if os.path.exists("checkpoint.pt"):
    first, states = torch.load("checkpoint.pt")
    for name, state in states.items():
        saved[name].load_state_dict(state)
for epoch in range(first, 3):
    sampler.set_epoch(epoch)
    model.train()
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        right = sum((net(a).argmax(1) == b).sum() for a, b in val_loader)
    dist.all_reduce(right)
    if rank == 0:
        print(f"epoch {epoch}: accuracy {right.item() / len(val):.4f}")
        states = {name: one.state_dict() for name, one in saved.items()}
        torch.save([epoch + 1, states], "checkpoint.tmp")
        os.replace("checkpoint.tmp", "checkpoint.pt")
dist.destroy_process_group()
