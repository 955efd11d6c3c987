"""The usual ImageNet script, as far as its speed goes: fp32 DDP, host reads each step.

    torchrun --nproc-per-node 2 -m benchmarks.usual_training FOLDER BATCH STEPS WARMUP \
        WORKERS OUTPUT

Trains a ResNet-18 at 224 pixels on FOLDER/train and writes images per second after the
first WARMUP steps to OUTPUT.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from benchmarks import usual


def percent_right(outputs: Tensor, labels: Tensor, k: int) -> float:
    """Top-k accuracy of a batch, read by the host at once."""
    best = outputs.topk(k, dim=1).indices
    return (best == labels.unsqueeze(1)).any(1).float().mean().item() * 100


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    device: torch.device,
) -> tuple[float, float, float]:
    """A step on a batch of the host; returns loss, top-1 and top-5, read at once."""
    images, labels = images.to(device), labels.to(device)
    outputs = model(images)
    loss = nn.functional.cross_entropy(outputs, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    best = percent_right(outputs, labels, 1), percent_right(outputs, labels, 5)
    return loss.item(), *best


def main() -> None:
    """Train `steps` steps."""
    folder, batch, steps, warmup, workers, output = sys.argv[1:]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    dataset = usual.train_set(Path(folder, "train"))
    sampler = DistributedSampler(dataset, world_size, rank)
    loader = DataLoader(
        dataset,
        int(batch) // world_size,
        sampler=sampler,
        num_workers=int(workers) // world_size,
        pin_memory=torch.cuda.is_available(),
    )
    model = DistributedDataParallel(
        torchvision.models.resnet18(num_classes=len(dataset.classes))
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=1e-4)
    for step, (images, labels) in enumerate(loader, start=1):
        figures = train_step(model, optimizer, images, labels, torch.device("cpu"))
        if rank == 0 and step % 10 == 0:
            print(step, figures, flush=True)
        if step == int(warmup):
            began = time.perf_counter()
        if step == int(steps):
            break
    if rank == 0:
        images = (int(steps) - int(warmup)) * int(batch)
        Path(output).write_text(str(images / (time.perf_counter() - began)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
