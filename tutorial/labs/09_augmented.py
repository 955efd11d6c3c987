"""Train a network; as augmentation, each image gets new noise whenever it is loaded.

torchrun --standalone --nproc-per-node 2 tutorial/labs/09_augmented.py

symptom: The augmentation varies less than on one GPU.
grader: the script adds the same noise to several images
checks: weights, noise, shares, steps, uneven(noise={})
doctor: same_random_numbers
lesson: 04_batches
path: core
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

EPOCHS, BATCH = 3, 8  # images per process and step


class NoisyImages(Dataset):
    """96 images of 8 pixels, in 3 classes."""

    def __init__(self):
        self.images = torch.randn(96, 8)
        self.labels = self.images[:, :3].argmax(1)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = 0.1 * torch.randn(8)
        return self.images[index] + noise, self.labels[index]


def main() -> None:
    """Each process runs this function."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = NoisyImages()
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
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
