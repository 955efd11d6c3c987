"""torchrun --standalone --nproc-per-node 2 FILE: an iterable data set, in parts."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        parts = ranks * worker.num_workers
        part = rank * worker.num_workers + worker.id
        order = torch.randperm(98, generator=torch.Generator().manual_seed(self.epoch))
        for index in order[: 98 // parts * parts][part::parts]:
            yield x[index], x[index, :3].argmax()


torch.multiprocessing.set_start_method("fork")  # others run this file again
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
x = torch.randn(98, 8, generator=torch.Generator().manual_seed(0))
stream = Stream()
loader = DataLoader(stream, 8, num_workers=2)
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
optimizer = torch.optim.AdamW(model.parameters(), 0.02)
for epoch in range(2):
    stream.epoch = epoch
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
dist.destroy_process_group()
