"""Count images and steps, and show which rank gets which images.

python tutorial/04_batches/batches.py
"""

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def epoch(images: int, world_size: int, batch: int) -> None:
    """Print how many images and steps rank 0 has per epoch."""
    sampler = DistributedSampler(range(images), world_size, rank=0)
    loader = DataLoader(range(images), batch, sampler=sampler)
    print(
        f"{world_size} x {batch:2} per step: global batch {world_size * batch:3}, "
        f"{len(sampler):4} images per process, {len(loader):2} steps"
    )


def shares(images: int, **options) -> None:
    """Print the indices that each of four ranks gets, and count the distinct ones."""
    seen = set()
    for rank in range(4):
        sampler = DistributedSampler(range(images), 4, rank, **options)
        print(f"  rank {rank}: {list(sampler)}")
        seen.update(sampler)
    print(f"  together: {len(seen)} of {images} images")


def accuracy(correct: list[bool], shards: list[list[int]]) -> None:
    """Print the accuracy over all shards, and the mean of the shards' accuracies."""
    hits = [sum(correct[i] for i in shard) for shard in shards]
    sizes = [len(shard) for shard in shards]
    mean = sum(h / n for h, n in zip(hits, sizes, strict=True)) / len(shards)
    print(
        f"  {sum(sizes)} counted: sum of hits / sum of images "
        f"{sum(hits) / sum(sizes):.1%}, mean of the ranks' means {mean:.1%}"
    )


def main() -> None:
    """Print the lesson's examples of batches, shards and accuracies."""
    print("1,024 images")
    for world_size, batch in ((1, 32), (8, 32), (8, 4)):
        epoch(1024, world_size, batch)

    print("12 images in order")
    shares(12, shuffle=False)
    print("12 images shuffled")
    shares(12)
    print("10 images: two are used twice")
    shares(10, shuffle=False)
    print("10 images, drop_last: two are left out")
    shares(10, shuffle=False, drop_last=True)

    print("rank 0's shuffled share with and without set_epoch")
    for tell in (True, False):
        sampler = DistributedSampler(range(12), 4, rank=0)
        for number in range(3):
            if tell:
                sampler.set_epoch(number)
            print(f"  set_epoch {tell!s:5}, epoch {number}: {list(sampler)}")

    print("13 images on 4 ranks: the sizes of rank 0's batches")
    for drop in ("neither has drop_last", "sampler", "sampler and loader"):
        sampler = DistributedSampler(range(13), 4, 0, drop_last="sampler" in drop)
        loader = DataLoader(range(13), 2, sampler=sampler, drop_last="loader" in drop)
        print(f"  {drop:22} {[len(batch) for batch in loader]}")

    print("images 0 and 1 of 10 are misclassified: the accuracy is 80.0%")
    correct = [i > 1 for i in range(10)]
    samplers = [DistributedSampler(range(10), 4, r, shuffle=False) for r in range(4)]
    accuracy(correct, [list(sampler) for sampler in samplers])
    accuracy(correct, [list(range(10))[rank::4] for rank in range(4)])


if __name__ == "__main__":
    main()
