"""Train a network on a stream of images from four files of different sizes.

In each epoch, all processes take the same number of steps. Each step uses 8 images per
process, and no image is used twice in an epoch.

torchrun --standalone --nproc-per-node 2 tutorial/labs/36_files.py

symptom: Training fails, or hangs, at the end of an epoch.
grader: after step 15, rank 1
checks: weights, shares(least=64), steps, facts(collectives=30)
doctor: batch_counts_differ
lesson: 18_streams
processes: 2, 1, 4
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

EPOCHS, BATCH, SIZES = 3, 8, (20, 28, 16, 32)  # images in each file


class Files(IterableDataset):
    """Yields this process's images, which are in every second file."""

    def __init__(self, images: Tensor, labels: Tensor):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        files = zip(images.split(SIZES), labels.split(SIZES), strict=True)
        self.files = list(files)[rank::world_size]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in self.files:
            order = torch.randperm(len(images))
            yield from zip(images[order], labels[order], strict=True)


def main() -> None:
    """Each process runs this function."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images = torch.randn(96, 8)
    dataset = Files(images, images[:, :3].argmax(1))
    loader = DataLoader(dataset, BATCH)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for epoch in range(EPOCHS):
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
