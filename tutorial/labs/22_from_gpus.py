"""Continue training the weights in pretrained.pt, which come from a machine with GPUs.

torchrun --standalone --nproc-per-node 2 tutorial/labs/22_from_gpus.py

symptom: A machine without a GPU cannot load the weights.
grader: RuntimeError: Attempting to deserialize object on a CUDA device
checks: weights, shares, steps, export(file="pretrained.pt", epochs=[0])
doctor: ends_with_an_error
lesson: 12_restarts
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = 3, 8  # images per process and step
PRETRAINED = Path(__file__).with_name("pretrained.pt")


def main() -> None:
    """Each process runs this function."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images = torch.randn(96, 8)
    dataset = TensorDataset(images, images[:, :3].argmax(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, BATCH, sampler=sampler)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    net.load_state_dict(torch.load(PRETRAINED))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
