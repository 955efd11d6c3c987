"""Train a network that skips its middle block at random (stochastic depth).

torchrun --standalone --nproc-per-node 2 tutorial/labs/15_random_depth.py

symptom: An early step fails.
grader: RuntimeError: Expected to have finished reduction in the prior iteration
checks: weights, shares, steps(size=467), blocks
doctor: ends_with_an_error
lesson: 11_hangs
processes: 2, 1
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = 3, 8  # images per process and step


class Net(nn.Module):
    """Two linear layers; the block between them runs in about half of the steps."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)
        self.block = nn.Sequential(nn.ReLU(), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the 3 classes for images of shape (N, 8)."""
        x = self.first(x)
        if not self.training or torch.rand(()) < 0.5:
            x = x + self.block(x)
        return self.last(x.relu())


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
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
