"""Train a network, and print each epoch's loss, averaged over all processes.

torchrun --standalone --nproc-per-node 2 tutorial/labs/06_mean_loss.py

symptom: A step moves the weights less than on one GPU.
grader: images: it moves the weights 0.50 times as far
checks: weights, shares, steps, printed(names=["loss"]),
  uneven(size=5, steps={"images": None})
doctor: loss_scale
lesson: 03_gradients
path: core
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = 3, 8  # images per process and step


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
        total = torch.zeros(())
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            (loss / dist.get_world_size()).backward()
            optimizer.step()
            total += loss.detach() / dist.get_world_size()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total.item() / len(loader):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
