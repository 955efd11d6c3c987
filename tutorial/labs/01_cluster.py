"""Two machines train one network; each process takes its share of the 96 images.

torchrun --standalone --nproc-per-node 2 tutorial/labs/01_cluster.py

symptom: Training works on one machine. On two machines, some images are never used.
grader: on 2 machines with 2 processes each, epoch 0 uses 96 images, of which 48 are
checks: weights, shares, steps, machines, uneven(size=5)
doctor: same_samples
lesson: 01_ranks
path: core
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = 3, 8  # images per process and step


def main() -> None:
    """Each process runs this function."""
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["LOCAL_RANK"]), dist.get_world_size()
    torch.manual_seed(0)
    images = torch.randn(96, 8)
    dataset = TensorDataset(images, images[:, :3].argmax(1))
    sampler = DistributedSampler(dataset, world_size, rank)
    loader = DataLoader(dataset, BATCH, sampler=sampler)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
