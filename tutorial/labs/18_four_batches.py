"""Train a network; a step has 4 batches of 4 images per process, and one all-reduce.

torchrun --standalone --nproc-per-node 2 tutorial/labs/18_four_batches.py

symptom: The processes end up with different weights.
grader: after step 1, the processes do not continue with the same weights
checks: weights, shares, facts(images_at_once=8), steps(batch=16)
doctor: not_averaged
lesson: 07_accumulation
path: core
processes: 2, 1
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, PASSES = 3, 4, 4


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
        for number, (x, y) in enumerate(loader):
            with nullcontext() if number % PASSES == 0 else model.no_sync():
                loss = F.cross_entropy(model(x), y) / PASSES
                loss.backward()
            if (number + 1) % PASSES == 0:
                optimizer.step()
                optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {PASSES * loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
