"""Train a network, and print its accuracy on the 33 validation images.

torchrun --standalone --nproc-per-node 2 tutorial/labs/11_accuracy.py

symptom: The printed accuracy is right with one process but wrong with two.
grader: the printed accuracy is
checks: weights, shares, steps, printed(names=["accuracy"], times=1)
doctor: wrong_number
lesson: 04_batches
path: core
processes: 2, 1, 6, 3, 12
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
    """Return the accuracy; the processes divide the work."""
    sampler = DistributedSampler(dataset, shuffle=False)
    net.eval()
    sums = torch.zeros(2)  # correct, total
    for x, y in DataLoader(dataset, BATCH, sampler=sampler):
        sums += torch.tensor([(net(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main() -> None:
    """Each process runs this function."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images = torch.randn(129, 8)
    labels = images[:, :3].argmax(1)
    dataset = TensorDataset(images[:96], labels[:96])
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
    result = accuracy(net, TensorDataset(images[96:], labels[96:]))
    if dist.get_rank() == 0:
        print(f"accuracy {result:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
