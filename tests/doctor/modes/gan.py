"""torchrun --standalone --nproc-per-node 2 FILE: two networks, two optimizers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
train = torch.randn(96, 4) + 2
sampler = DistributedSampler(train)
loader = DataLoader(train, 8, sampler=sampler)
net_g = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4))
net_d = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
gen, dis = DDP(net_g), DDP(net_d)
g_optimizer = torch.optim.Adam(net_g.parameters(), 0.01)
d_optimizer = torch.optim.Adam(net_d.parameters(), 0.01)
noise = torch.Generator().manual_seed(dist.get_rank())
loss_of, ones = nn.BCEWithLogitsLoss(), torch.ones(8, 1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for real in loader:
        fake = gen(torch.randn(8, 2, generator=noise))
        outputs = dis(torch.cat([real, fake.detach()]))
        d_loss = loss_of(outputs, torch.cat([ones, 0 * ones]))
        d_optimizer.zero_grad()
        d_loss.backward()
        d_optimizer.step()
        g_loss = loss_of(net_d(fake), ones)
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
dist.destroy_process_group()
