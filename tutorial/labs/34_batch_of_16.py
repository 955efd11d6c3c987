"""Train a network with a global batch size of 16 and a learning rate of 0.1.

torchrun --standalone --nproc-per-node 2 tutorial/labs/34_batch_of_16.py

symptom: With the same global batch size, a step moves the weights more than on one GPU.
grader: images: it moves the weights 2.00 times as far
checks: weights, shares, steps(images=16)
doctor: -
lesson: 17_large_batches
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, RATE = 3, 16, 0.1


def main() -> None:
    """Each process runs this function."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    world_size = dist.get_world_size()
    images = torch.randn(96, 8)
    dataset = TensorDataset(images, images[:, :3].argmax(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, BATCH // world_size, sampler=sampler)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    model = DDP(net)
    rate = RATE * world_size  # the linear scaling rule
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
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
