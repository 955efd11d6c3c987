"""Train a network on images minus their mean, which rank 0 computes in each run.

torchrun --standalone --nproc-per-node 2 tutorial/labs/04_centered.py

symptom: A process cannot find a file.
grader: before the first step, rank 1 fails with FileNotFoundError:
checks: weights, centered, shares, steps, old_file(name="mean.pt"),
  uneven(size=5, centered={})
doctor: file_race
lesson: 08_collectives
"""

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = 3, 8  # images per process and step


def prepare(images: Tensor) -> None:
    """Write the mean of all images to mean.pt."""
    time.sleep(2)  # in reality, there are more images
    torch.save(images.mean(0), "mean.pt")


def main() -> None:
    """Each process runs this function."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images = torch.randn(96, 8)
    labels = images[:, :3].argmax(1)
    if dist.get_rank() == 0:
        prepare(images)
    dataset = TensorDataset(images - torch.load("mean.pt"), labels)
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
