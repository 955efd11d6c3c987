"""Train a network with Horovod, and print each epoch's loss over all processes.

horovodrun -np 2 python tutorial/labs/30_horovod.py

symptom: The script prints a smaller loss with Horovod than it did with DDP.
grader: after step 6, the printed loss is
checks: weights, shares, steps, printed(names=["loss"])
doctor: wrong_number
lesson: 13_horovod
"""

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = 3, 8  # images per process and step


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
        total = torch.zeros(())
        for x, y in loader:
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        hvd.allreduce(total)
        mean = total / len(loader) / hvd.size()
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {mean.item():.4f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
