"""torchrun --standalone --nproc-per-node 2 FILE: DDP with an EMA, stopped within an epoch and resumed."""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

PER_EPOCH = 10


class Average:
    def __init__(self, net):
        self.net, self.updates = copy.deepcopy(net).requires_grad_(False), 0

    @torch.no_grad()
    def update(self, net):
        self.updates += 1
        decay = min(0.99, self.updates / (self.updates + 9))
        for mean, one in zip(self.net.parameters(), net.parameters(), strict=True):
            mean.lerp_(one, 1 - decay)


def train(until):
    torch.manual_seed(rank)  # DDP copies rank 0's weights
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    model, optimizer = DDP(net), torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    average, step = Average(net), 0
    if os.path.exists("checkpoint.pt"):
        state = torch.load("checkpoint.pt")
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        average.net.load_state_dict(state["average"])
        average.updates, step = state["updates"], state["step"]
    while step < until:
        epoch, done = divmod(step, PER_EPOCH)
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(data), generator=generator)[rank::2].tolist()
        for inputs, labels in DataLoader(data, 8, sampler=order[8 * done :]):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            average.update(net)
            step += 1
            if step % 5 == 0:
                with torch.no_grad():
                    right = (average.net(x).argmax(1) == labels_of(x)).sum()
                state = {"net": net, "optimizer": optimizer, "average": average.net}
                state = {name: one.state_dict() for name, one in state.items()}
                state |= {"updates": average.updates, "step": step}
                if rank == 0:
                    print(f"step {step}: accuracy {right / len(x):.4f}")
                    torch.save(state, "checkpoint.pt")
            if step == until:
                break


def labels_of(x):
    return x[:, :3].argmax(1)


dist.init_process_group("gloo")
rank, x = dist.get_rank(), torch.randn(160, 8, generator=torch.Generator())
data = TensorDataset(x, labels_of(x))
for until in 25, 40:  # the first run stops in the middle of the third epoch
    train(until)
    dist.barrier()
dist.destroy_process_group()
