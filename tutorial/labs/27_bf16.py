"""Train a network in bf16, with a learning rate of 0.001.

torchrun --standalone --nproc-per-node 2 tutorial/labs/27_bf16.py

symptom: Most steps leave some weights unchanged.
grader: images: it moves the weights 0.
checks: weights, shares, steps(rate=0.001, rounding=0.12),
  facts(dtypes=[{"torch.bfloat16"}])
doctor: -
lesson: 09_mixed_precision
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
    model = DDP(net.bfloat16())
    optimizer = torch.optim.SGD(model.parameters(), 0.001, momentum=0.9)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x.bfloat16()).float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
