"""Train a network with batch norm; after each epoch, rank 0 prints the accuracy.

torchrun --standalone --nproc-per-node 2 tutorial/labs/20_each_epoch.py

symptom: Training hangs in validation.
grader: nothing happens for
checks: weights, shares, steps(size=227),
  printed(names=["accuracy"], divided=False)
doctor: collectives_differ
lesson: 11_hangs
path: core
"""

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
    torch.manual_seed(0)
    images = torch.randn(129, 8)
    labels = images[:, :3].argmax(1)
    dataset = TensorDataset(images[:96], labels[:96])
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, BATCH, sampler=sampler)
    net = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
    )
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        if dist.get_rank() == 0:
            with torch.no_grad():
                hits = (model(images[96:]).argmax(1) == labels[96:]).sum()
            print(f"epoch {epoch}: accuracy {hits.item() / 33:.4f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
