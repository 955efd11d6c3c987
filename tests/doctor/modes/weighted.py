"""torchrun --standalone --nproc-per-node 2 FILE: weighted draws, noise, a data file."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __getitem__(self, index: int):
        noise = torch.tensor(np.random.randn(8)).float()
        return x[index] + 0.1 * noise, y[index]


class WeightedShard:
    def __iter__(self):
        seed = torch.Generator().manual_seed(self.epoch)
        drawn = (1 / y.bincount()[y]).multinomial(len(y), True, generator=seed)
        return iter(drawn[rank::ranks].tolist())


torch.multiprocessing.set_start_method("fork")  # others run this file again
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
if rank == 0:
    x = torch.randn(96, 8)
    torch.save([x, x[:, :3].argmax(1)], "data.pt")
dist.barrier()
x, y = torch.load("data.pt")
sampler = WeightedShard()
draws = torch.Generator().manual_seed(rank)  # seeds the loader processes
loader = DataLoader(Noisy(), 8, sampler=sampler, num_workers=2, generator=draws)
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 3)))
optimizer = torch.optim.Adam(model.parameters(), 0.02)
for epoch in range(2):
    sampler.epoch = epoch
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
dist.destroy_process_group()
