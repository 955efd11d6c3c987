"""Train a network on 96 of 129 images, and validate it on the other 33.

torchrun --standalone --nproc-per-node 2 tutorial/labs/13_held_out.py

symptom: You cannot trust the validation accuracy.
grader: validation images that are also used for training
checks: printed(names=["accuracy"], times=1), weights, shares, steps
doctor: datasets_differ
lesson: 04_batches
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

EPOCHS, BATCH = 3, 8  # images per process and step


def load_images() -> TensorDataset:
    """Return the same 129 images and labels in every process."""
    images = torch.randn(129, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(images, images[:, :3].argmax(1))


def main() -> None:
    """Each process runs this function."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    dataset, val_dataset = random_split(load_images(), [96, 33])
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
    mine = range(rank, len(val_dataset), world_size)
    net.eval()
    hits = torch.zeros(())
    with torch.no_grad():
        for x, y in DataLoader(val_dataset, BATCH, sampler=mine):
            hits += (net(x).argmax(1) == y).sum()
    dist.all_reduce(hits)
    if rank == 0:
        print(f"accuracy {hits.item() / len(val_dataset):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
