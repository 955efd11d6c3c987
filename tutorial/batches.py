"""Who gets which images: the arithmetic of batches, with PyTorch's own sampler.

python tutorial/batches.py
"""

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def epoch(images: int, world_size: int, batch: int) -> None:
    """Count what rank 0 does in one epoch; no processes are needed for that."""
    sampler = DistributedSampler(range(images), world_size, rank=0)
    loader = DataLoader(range(images), batch, sampler=sampler)
    print(
        f"{world_size} x {batch:2} a step: effective batch {world_size * batch:3}, "
        f"{len(sampler):4} images each, {len(loader):2} iterations"
    )


def shares(images: int, world_size: int, **options) -> None:
    """Print which indices each rank gets."""
    for rank in range(world_size):
        sampler = DistributedSampler(range(images), world_size, rank, **options)
        print(f"  rank {rank}: {list(sampler)}")


def accuracy(correct: list[bool], shards: list[list[int]]) -> None:
    """Three ways to put the processes' counts together; only one is right."""
    hits = [sum(correct[i] for i in shard) for shard in shards]
    sizes = [len(shard) for shard in shards]
    mean = sum(h / n for h, n in zip(hits, sizes, strict=True)) / len(shards)
    print(
        f"  {sum(sizes)} counted: sum of hits / sum of images "
        f"{sum(hits) / sum(sizes):.1%}, mean of the ranks' means {mean:.1%}"
    )


def main() -> None:
    """Print the arithmetic of the page, one part after the other."""
    print("1,024 images")
    for world_size, batch in ((1, 32), (8, 32), (8, 4)):
        epoch(1024, world_size, batch)

    print("12 images, 4 ranks, in order: indices[rank:total:world_size]")
    shares(12, 4, shuffle=False)
    print("10 images: the first two are given out twice")
    shares(10, 4, shuffle=False)
    print("10 images, drop_last: two are left out")
    shares(10, 4, shuffle=False, drop_last=True)

    print("rank 0's shuffled share with and without set_epoch")
    for tell in (True, False):
        sampler = DistributedSampler(range(12), 4, rank=0, seed=0)
        for number in range(3):
            if tell:
                sampler.set_epoch(number)
            print(f"  set_epoch {tell!s:5}, epoch {number}: {list(sampler)}")

    print("images 0 and 1 of 10 are wrong: the accuracy is 80.0%")
    correct = [i > 1 for i in range(10)]
    padded = [
        list(DistributedSampler(range(10), 4, r, shuffle=False)) for r in range(4)
    ]
    accuracy(correct, padded)
    accuracy(correct, [list(range(10))[rank::4] for rank in range(4)])

    print("nn.DataParallel divides the batch it is given, with chunk")
    for batch in (32, 30, 5):
        sizes = [len(part) for part in torch.arange(batch).chunk(4)]
        print(f"  {batch} images on 4 GPUs: {sizes}")


if __name__ == "__main__":
    main()
