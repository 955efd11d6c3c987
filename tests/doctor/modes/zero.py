"""torchrun --standalone --nproc-per-node 2 FILE: ZeRO, two losses, sums of 8."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.classes, self.total = nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x, both: bool):
        return self.classes(x), self.total(x)[:, 0] if both else None


dist.init_process_group("gloo")
torch.manual_seed(0)
train = [(one, one[:3].argmax()) for one in torch.randn(96, 8)]
sampler = DistributedSampler(train)
loader = DataLoader(train, 8, sampler=sampler)
model = DDP(Net(), find_unused_parameters=True)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.2 / 8)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        classes, total = model(inputs, both=inputs.mean() > 0)
        loss = nn.functional.cross_entropy(classes, labels, reduction="sum")
        if total is not None:
            loss += 0.1 * nn.functional.mse_loss(total, inputs.sum(1), reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
optimizer.consolidate_state_dict(to=0)
if dist.get_rank() == 0:
    torch.save([model.module.state_dict(), optimizer.state_dict()], "checkpoint.pt")
dist.destroy_process_group()
