"""Train a network with Horovod; the averaged gradient has a norm of at most 0.3.

horovodrun -np 2 python tutorial/labs/30_horovod.py

symptom: With clipping under Horovod, a step differs from a step on one GPU.
grader: one process does with the same 16 images and a gradient norm of at most 0.3
checks: weights, shares, steps(max_norm=0.3)
doctor: -
lesson: 13_horovod
"""

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, MAX_NORM = 3, 8, 0.3


def main() -> None:
    """Each process runs this function."""
    hvd.init()
    torch.manual_seed(0)
    images = torch.randn(96, 8)
    dataset = TensorDataset(images, images[:, :3].argmax(1))
    sampler = DistributedSampler(dataset, hvd.size(), hvd.rank())
    loader = DataLoader(dataset, BATCH, sampler=sampler)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
            optimizer.step()
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
