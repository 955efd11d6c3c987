"""Train a network with DDP, and print how many bytes of gradients a process sends.

torchrun --standalone --nproc-per-node 2 tutorial/labs/25_bytes.py

symptom: The processes end up with different weights.
grader: the processes do not continue with the same weights
checks: weights, shares, steps(rounding=5e-5), printed(names=["bytes"])
doctor: not_averaged
lesson: 06_overlap
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = 3, 8  # images per process and step


def send(sent: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients over the processes, for DDP."""
    gradients = bucket.buffer()
    sent.append(gradients.nbytes)
    gradients /= dist.get_world_size()
    dist.all_reduce(gradients, async_op=True)
    averaged = torch.futures.Future()
    averaged.set_result(gradients)
    return averaged


def main() -> None:
    """Each process runs this function."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images = torch.randn(96, 8)
    dataset = TensorDataset(images, images[:, :3].argmax(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, BATCH, sampler=sampler)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    model, sent = DDP(net), []
    model.register_comm_hook(sent, send)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, bytes {sum(sent)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
