"""Train a network; after a kill, the next run continues from checkpoint.pt alone.

torchrun --standalone --nproc-per-node 2 tutorial/labs/23_continued.py

symptom: A resumed run ends up with different weights than an uninterrupted run.
grader: its final weights are not those of an uninterrupted run
checks: weights, shares, steps, resumes, facts(lost_checkpoints=0)
doctor: no_optimizer
lesson: 12_restarts
path: core
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = 3, 8  # images per process and step
CHECKPOINT = Path("checkpoint.pt")


def main() -> None:
    """Each process runs this function."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images = torch.randn(96, 8)
    dataset = TensorDataset(images, images[:, :3].argmax(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, BATCH, sampler=sampler)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    first = 0
    if CHECKPOINT.exists():
        content = torch.load(CHECKPOINT, map_location="cpu")
        net.load_state_dict(content["model"])
        first = content["epoch"] + 1
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
            content = {"model": net.state_dict(), "epoch": epoch}
            torch.save(content, f"{CHECKPOINT}.tmp")
            Path(f"{CHECKPOINT}.tmp").replace(CHECKPOINT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
