"""Measure the gradient noise scale from each process's gradient and DDP's average.

python tutorial/17_large_batches/large_batches_noise.py [FILE.json]    # [scales]
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

IMAGES, EPOCHS, SMALL, LARGE = 4096, 8, 32, 64
# Ten digits of 5 x 3 pixels, one bit per pixel
FONT = [31599, 9879, 29671, 29647, 23497, 31183, 31215, 29257, 31727, 31695]


def digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw `count` noisy images of digits (8 x 8 pixels); return images and labels."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=random)
    pixels = torch.tensor(FONT)[labels, None] >> torch.arange(14, -1, -1) & 1
    images = 0.25 * torch.randn(count, 8, 8, generator=random)
    images[:, 1:6, 2:5] += pixels.view(count, 5, 3)
    return images.flatten(1), labels


def measure(norms: list, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket as DDP does; record its squared norm before and after."""
    own = bucket.buffer().square().sum()

    def averaged(future) -> Tensor:
        mean = future.value()
        norms.append((own, mean.square().sum()))
        return mean

    return allreduce_hook(None, bucket).then(averaged)


def main(rank: int, port: int, file: str | None) -> None:
    """Train in both processes; rank 0 prints the noise scale of each epoch."""
    torch.set_default_dtype(torch.float64)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    images, labels = digits(IMAGES, seed=1)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    norms, scales = [], []
    model.register_comm_hook(norms, measure)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.9)
    for epoch in range(1, EPOCHS + 1):
        norms.clear()
        for batch in torch.randperm(IMAGES).split(LARGE):  # the same in both processes
            mine = batch[rank::2]
            optimizer.zero_grad()
            F.cross_entropy(model(images[mine]), labels[mine]).backward()
            optimizer.step()
        means = torch.tensor(norms).mean(0)  # over the epoch's steps, one bucket each
        dist.all_reduce(means)  # and over the processes
        small, large = (means / 2).tolist()
        signal = (LARGE * large - SMALL * small) / (LARGE - SMALL)
        noise = (small - large) / (1 / SMALL - 1 / LARGE)
        scales.append(noise / signal)
        if rank == 0:
            parts = f"|G|^2 {signal:.4f}, noise {noise:5.2f}"
            print(f"epoch {epoch}: {parts}, noise scale {noise / signal:4.0f}")
    if rank == 0 and file:
        Path(file).write_text(json.dumps(scales))
    dist.destroy_process_group()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(main, args=(store.port, *(sys.argv[1:] or [None])), nprocs=2)
