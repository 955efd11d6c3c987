"""Train a network; whenever the run ends, checkpoint.pt holds the last complete epoch.

torchrun --standalone --nproc-per-node 2 tutorial/labs/24_last_epoch.py

symptom: After a crash, the checkpoint cannot be read.
grader: lost checkpoints: 2, but allowed: 0
checks: weights, shares, steps, facts(lost_checkpoints=0),
  export(file="checkpoint.pt", part="model", epochs=[1, 2, 3])
doctor: save_in_place
lesson: 12_restarts
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = 3, 8  # images per process and step


def save(content: dict) -> None:
    """Write the checkpoint."""
    if dist.get_rank() == 0:
        torch.save(content, "checkpoint.pt")


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
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        parts = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        save({**parts, "epoch": epoch})
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
