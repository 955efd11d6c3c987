"""Train a network; a step uses the mean gradient of 4 batches of 2 images per process.

torchrun --standalone --nproc-per-node 2 tutorial/labs/17_four_batches.py

symptom: A step of four batches moves the weights more than a step of one large batch.
grader: images: it moves the weights 4.00 times as far
checks: weights, shares, steps,
  facts(images_at_once=4, all_reduces_per_step=4)
doctor: loss_scale
lesson: 07_accumulation
path: core
processes: 2, 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, PASSES = 3, 2, 4


def main() -> None:
    """Each process runs this function."""
    dist.init_process_group("gloo")
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
        for number, (x, y) in enumerate(loader, start=1):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if number % PASSES == 0:
                optimizer.step()
                optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
