"""Train a classifier in several processes: the capstone. This script has six mistakes.

    torchrun --standalone --nproc-per-node 2 tutorial/labs/capstone.py

It should do what one process does with batches of 16 images: each epoch shuffles the
96 training images before it divides them, each image gets its own noise, the learning
rate falls from 0.1 to almost 0 at the end, and each epoch ends by printing the loss on
the training images and the accuracy on the 33 validation images. If a run is killed,
the next run continues after the last complete epoch, and ends with the same weights as
a run that was never interrupted.

symptom: none
grader: mistakes left: 6
checks: weights, facts(images_at_once=8, lost_checkpoints=0), noise, rates,
  steps(images=16, rate=None), shares(divided=True), resumes,
  printed(names=["accuracy", "loss"])
doctor: -
lesson: 12_restarts
processes: 2, 1, 4
"""

import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

EPOCHS = 3
BATCH = 16  # images per step, in all processes together
MICRO_BATCHES = 2  # per step and process
LR, MOMENTUM = 0.1, 0.9
NOISE = 0.1
SEED = 0
CHECKPOINT = Path("checkpoint.pt")


class Images(Dataset):
    """Images of 8 pixels in 3 classes; the first 96 are for training."""

    def __init__(self, training: bool):
        generator = torch.Generator().manual_seed(SEED)
        images = torch.randn(129, 8, generator=generator)
        labels = images[:, :3].argmax(1)
        part = slice(96) if training else slice(96, None)
        self.images, self.labels, self.training = images[part], labels[part], training

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if self.training:
            image = image + NOISE * torch.randn(len(image))
        return image, self.labels[index]


@dataclass
class Job:
    """This process's rank and the number of processes."""

    rank: int
    world_size: int

    @property
    def is_first(self) -> bool:
        """Whether this process prints and saves."""
        return self.rank == 0


def start() -> Job:
    """Join the other processes."""
    dist.init_process_group("gloo")
    return Job(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def build_loaders(job: Job) -> tuple[DataLoader, DataLoader]:
    """Return the loaders of this process's training and validation images."""
    size = BATCH // job.world_size // MICRO_BATCHES
    training, validation = Images(training=True), Images(training=False)
    sampler = DistributedSampler(training, shuffle=True, seed=SEED)
    train_loader = DataLoader(training, size, sampler=sampler, drop_last=True)
    sampler = range(job.rank, len(validation), job.world_size)
    return train_loader, DataLoader(validation, size, sampler=sampler)


def build_network() -> nn.Module:
    """Return a network with the same weights in each process."""
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def train(
    model: DDP,
    loader: DataLoader,
    optimizer: torch.optim.Optimizer,
    scheduler: CosineAnnealingLR,
) -> Tensor:
    """Train for one epoch; return the sum of the losses of this process's images."""
    model.train()
    total = torch.zeros(())
    for number, (images, labels) in enumerate(loader, start=1):
        last = number % MICRO_BATCHES == 0  # the last micro-batch of a step
        with nullcontext() if last else model.no_sync():
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
        total += loss.detach() * len(images)
        if last:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return total


@torch.no_grad()
def validate(net: nn.Module, loader: DataLoader) -> Tensor:
    """Count this process's correct predictions and its images, for each class."""
    net.eval()
    right, count = torch.zeros(3), torch.zeros(3)
    for images, labels in loader:
        hits = net(images).argmax(1) == labels
        right += torch.bincount(labels[hits], minlength=3)
        count += torch.bincount(labels, minlength=3)
    return torch.stack([right, count])


def save(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: CosineAnnealingLR,
    epoch: int,
) -> None:
    """Replace the checkpoint; if the run is killed meanwhile, the old one remains."""
    content = {"model": net.state_dict(), "scheduler": scheduler.state_dict()}
    content |= {"optimizer": optimizer.state_dict(), "epoch": epoch}
    new = CHECKPOINT.with_suffix(".new")
    torch.save(content, new)
    new.replace(CHECKPOINT)


def load(
    net: nn.Module, optimizer: torch.optim.Optimizer, scheduler: CosineAnnealingLR
) -> int:
    """Load the checkpoint if there is one; return the first epoch to train."""
    if not CHECKPOINT.exists():
        return 0
    content = torch.load(CHECKPOINT, map_location="cpu", weights_only=True)
    net.load_state_dict(content["model"])
    scheduler.load_state_dict(content["scheduler"])
    optimizer.load_state_dict(content["optimizer"])
    return content["epoch"]


def main() -> None:
    """Each process runs this function."""
    job = start()
    train_loader, val_loader = build_loaders(job)
    net = build_network()
    rate = LR * job.world_size  # more processes, larger steps
    optimizer = torch.optim.SGD(net.parameters(), rate, momentum=MOMENTUM)
    steps = len(train_loader.dataset) // BATCH  # in an epoch
    scheduler = CosineAnnealingLR(optimizer, EPOCHS * steps)
    first_epoch = load(net, optimizer, scheduler)
    model = DDP(net)
    for epoch in range(first_epoch, EPOCHS):
        torch.manual_seed(SEED + epoch)  # a resumed run draws the same noise
        total = train(model, train_loader, optimizer, scheduler)
        counts = validate(net, val_loader)
        dist.all_reduce(total)
        dist.all_reduce(counts)
        if job.is_first:
            loss, (right, count) = total / len(train_loader.dataset), counts
            accuracy = (right / count).mean()
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}")
            save(net, optimizer, scheduler, epoch)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
