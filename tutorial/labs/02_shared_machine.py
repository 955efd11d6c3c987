"""Train a network in two processes on this machine; other jobs may run here too.

torchrun --standalone --nproc-per-node 2 tutorial/labs/02_shared_machine.py

symptom: Training fails while another job runs on the machine.
grader: if another run is in progress, before the first step, rank 0 fails with
checks: weights, shares, steps, another_run
doctor: own_port
lesson: 01_ranks
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = 3, 8  # images per process and step


def connect() -> None:
    """Join the other processes."""
    dist.init_process_group(
        "gloo",
        init_method="tcp://127.0.0.1:29500",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def main() -> None:
    """Each process runs this function."""
    connect()
    torch.manual_seed(0)
    images = torch.randn(96, 8)
    dataset = TensorDataset(images, images[:, :3].argmax(1))
    sampler = DistributedSampler(dataset)
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
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
