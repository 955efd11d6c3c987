"""Train a network with batch norm, validate it in both processes, and save it.

torchrun --standalone --nproc-per-node 2 tutorial/labs/16_batch_norm.py

symptom: The accuracy of the saved model differs from the printed accuracy.
grader: the processes do not validate model.pt
checks: weights, shares, steps(size=227), export, printed(names=["accuracy"], times=1)
doctor: buffers_differ
lesson: 08_collectives
path: core
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

EPOCHS, BATCH = 3, 8  # images per process and step


@torch.no_grad()
def accuracy(net: nn.Module, dataset: Dataset) -> float:
    """Return the accuracy; each process evaluates every second image."""
    mine = range(dist.get_rank(), len(dataset), dist.get_world_size())
    net.eval()
    hits = torch.zeros(())
    for x, y in DataLoader(dataset, BATCH, sampler=mine):
        hits += (net(x).argmax(1) == y).sum()
    dist.all_reduce(hits)
    return hits.item() / len(dataset)


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
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    result = accuracy(net, TensorDataset(images[96:], labels[96:]))
    if dist.get_rank() == 0:
        print(f"accuracy {result:.4f}")
        torch.save(net.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
