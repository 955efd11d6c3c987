"""Train a network in two processes without DDP: the gradients are averaged by hand.

torchrun --standalone --nproc-per-node 2 tutorial/labs/03_by_hand.py

symptom: The processes end up with different weights.
grader: have different weights before the first step
checks: weights, shares, steps
doctor: weights_differ
lesson: 05_build_ddp
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = 3, 8  # images per process and step


def average_gradients(net: nn.Module) -> None:
    """Replace each gradient with its mean over all processes."""
    for weight in net.parameters():
        dist.all_reduce(weight.grad)
        weight.grad /= dist.get_world_size()


def load_images() -> TensorDataset:
    """Return the same 96 images and labels in every process."""
    images = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(images, images[:, :3].argmax(1))


def main() -> None:
    """Each process runs this function."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    dataset = load_images()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, BATCH, sampler=sampler)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(net)
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
