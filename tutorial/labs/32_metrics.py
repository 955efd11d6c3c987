"""Train a network, and print each epoch's loss and accuracy over all processes.

torchrun --standalone --nproc-per-node 2 tutorial/labs/32_metrics.py

symptom: On a slow network, training is slower than it could be.
grader: collectives: 36, but allowed: 9
checks: weights, shares, steps, printed(names=["loss", "accuracy"]),
  facts(collectives=9), waits(most=6)
doctor: -
lesson: 19_talk_less
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = 3, 8  # images per process and step


def average(value: Tensor) -> Tensor:
    """Return the mean over all processes."""
    dist.all_reduce(value)
    return value / dist.get_world_size()


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
        total, right = torch.zeros(()), torch.zeros(())
        for x, y in loader:
            scores = model(x)
            loss = F.cross_entropy(scores, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += average(loss.detach())
            right += average((scores.argmax(1) == y).float().mean())
        if dist.get_rank() == 0:
            loss, accuracy = total.item() / len(loader), right.item() / len(loader)
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
