"""torchrun --standalone --nproc-per-node 2 FILE: AMP, no_sync, batch norm, EMA."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
shared = torch.Generator().manual_seed(0)
data = [(one, one[:3].argmax()) for one in torch.randn(129, 8, generator=shared)]
sampler = DistributedSampler(data[:96])
loader = DataLoader(data[:96], 4, sampler=sampler)
val_loader = DataLoader(data[96:], 6, sampler=range(rank, 33, ranks))
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
model = DDP(net)  # copies rank 0's weights
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
optimizer = torch.optim.SGD(net.parameters(), 0.2, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")
for epoch in range(3):
    sampler.set_epoch(epoch)
    for number, (inputs, labels) in enumerate(loader, start=1):
        last = number % 2 == 0  # of the two micro-batches of a step
        with contextlib.nullcontext() if last else model.no_sync():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(inputs), labels) / 2
            scaler.scale(loss).backward()
        if last:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            ema.update_parameters(net)
    for buffer in ema.buffers():
        dist.broadcast(buffer, 0)
    ema.eval()
    right = sum((ema(a).argmax(1) == b).sum() for a, b in val_loader)
    dist.all_reduce(right)
    if rank == 0:
        print(f"epoch {epoch}: accuracy {right.item() / 33:.4f}")
dist.destroy_process_group()
