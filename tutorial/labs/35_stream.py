"""Train a network on a stream of images; each is read once, by one of two workers.

torchrun --standalone --nproc-per-node 2 tutorial/labs/35_stream.py

symptom: Two processes need as many steps as one.
grader: epoch 0 uses 192 images, of which 96 are different; it should use each of
checks: weights, shares, steps, batches, facts(workers=[2], collectives=40)
doctor: left_out
lesson: 18_streams
processes: 2, 1, 3
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

EPOCHS, BATCH = 3, 8  # images per process and step


class Stream(IterableDataset):
    """Yields images and labels, in a new order in each epoch."""

    def __init__(self, images: Tensor, labels: Tensor):
        self.images, self.labels, self.epoch = images, labels, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(len(self.images), generator=generator)
        for index in order[dist.get_rank() :: dist.get_world_size()]:
            yield self.images[index], self.labels[index]


def main() -> None:
    """Each process runs this function."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images = torch.randn(96, 8)
    dataset = Stream(images, images[:, :3].argmax(1))
    options = {"num_workers": 2, "multiprocessing_context": "fork"}
    loader = DataLoader(dataset, BATCH, **options)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        dataset.epoch = epoch
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
