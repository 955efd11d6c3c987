"""torchrun --standalone --nproc-per-node 2 FILE: a contrastive loss over all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
sampler = DistributedSampler(pairs := torch.randn(96, 1, 8) + torch.randn(96, 2, 8))
loader = DataLoader(pairs, 8, sampler=sampler)
model = DDP(nn.Linear(8, 16))
optimizer = torch.optim.Adam(model.parameters())
steps = 4 * len(loader)
scheduler = LambdaLR(optimizer, lambda n: max(0.1, 1 - n / steps))
for epoch in range(4):
    sampler.set_epoch(epoch)
    for batch in loader:
        own = model(batch)
        parts = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(parts, own)
        parts[dist.get_rank()] = own
        one, other = torch.cat(parts).unbind(1)
        loss = nn.functional.cross_entropy(one @ other.T, torch.arange(16))
        optimizer.zero_grad()
        (loss + 0.01 * own.square().mean()).backward()
        optimizer.step()
        scheduler.step()
dist.destroy_process_group()
