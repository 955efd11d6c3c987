"""Train with weights averaged after every fourth step, and save the mean weights.

torchrun --standalone --nproc-per-node 2 tutorial/labs/37_local_steps.py

symptom: The saved weights come from only one process.
grader: model.pt does not hold the processes' mean weights
checks: weights(every=4), shares, steps(alone=True), export
doctor: weights_drift
lesson: 19_talk_less
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, EVERY = 3, 8, 4


@torch.no_grad()
def average_weights(net: nn.Module) -> None:
    """Replace each weight with its mean over all processes."""
    for weight in net.parameters():
        dist.all_reduce(weight)
        weight /= dist.get_world_size()


def main() -> None:
    """Each process runs this function."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images = torch.randn(96, 8)
    dataset = TensorDataset(images, images[:, :3].argmax(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, BATCH, sampler=sampler)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    step = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % EVERY == 0:
                average_weights(net)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    if dist.get_rank() == 0:
        torch.save(net.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
