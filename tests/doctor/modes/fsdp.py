"""torchrun --standalone --nproc-per-node 2 FILE: FSDP2."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
train = [(one, one[:3].argmax()) for one in torch.randn(96, 8)]
sampler = DistributedSampler(train)
loader = DataLoader(train, 8, sampler=sampler)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
for part in (net[0], net[2], net):
    fully_shard(part)
optimizer = torch.optim.AdamW(net.parameters(), 0.02)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
whole = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
states = dcp.get_state_dict(net, optimizer, options=whole)
if dist.get_rank() == 0:
    torch.save(states, "checkpoint.pt")
dist.destroy_process_group()
