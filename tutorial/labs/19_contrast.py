"""Train a network on images with enough contrast, split between the processes.

torchrun --standalone --nproc-per-node 2 tutorial/labs/19_contrast.py

symptom: Training hangs at the end of an epoch.
grader: rank 0 is still waiting in b
checks: weights, shares(least=64, contrast=0.7, repeats=16), steps(most=4),
  facts(collectives=60), uneven(size=9, contrast=0.7)
doctor: batch_counts_differ
lesson: 18_streams
processes: 2, 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

EPOCHS, BATCH, CONTRAST = 3, 8, 0.7


def main() -> None:
    """Each process runs this function."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images = torch.randn(96, 8)
    dataset = TensorDataset(images, images[:, :3].argmax(1))
    mine = range(dist.get_rank(), len(images), dist.get_world_size())
    mine = [index for index in mine if images[index].std() > CONTRAST]
    loader = DataLoader(dataset, BATCH, sampler=SubsetRandomSampler(mine))
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
