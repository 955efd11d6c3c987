"""Train a network that computes its own loss.

torchrun --standalone --nproc-per-node 2 tutorial/labs/05_own_loss.py

symptom: The processes end up with different weights, although DDP wraps the model.
grader: after step 1, the processes do not continue with the same weights
checks: weights, shares, steps
doctor: not_averaged
lesson: 05_build_ddp
path: core
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = 3, 8  # images per process and step


class Net(nn.Module):
    """Two linear layers, and the loss used to train them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the 3 classes for images of shape (N, 8)."""
        return self.layers(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch of images and labels."""
        return F.cross_entropy(self(x), y)


def main() -> None:
    """Each process runs this function."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images = torch.randn(96, 8)
    dataset = TensorDataset(images, images[:, :3].argmax(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, BATCH, sampler=sampler)
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = model.module.loss(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
