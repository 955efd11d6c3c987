"""Random numbers that depend on a key and on nothing else."""

import random

import numpy
import torch


def seed_from(*key: int) -> int:
    """Hash a key of non-negative integers to a 32-bit seed (PyTorch uses no more bits).

    Source:
    https://numpy.org/doc/stable/reference/random/bit_generators/generated/numpy.random.SeedSequence.html
    """
    return int(numpy.random.SeedSequence(key).generate_state(1)[0])


def seed_augmentation(seed: int, epoch: int, index: int) -> None:
    """Make what is drawn next for one image a function of (seed, epoch, index) alone.

    Seeds Python's generator, which the crops draw from, and PyTorch's, which
    torchvision's transforms do.
    """
    number = seed_from(seed, epoch, index)
    torch.default_generator.manual_seed(number)
    random.seed(number)


def seed_step(seed: int, epoch: int, step: int, rank: int) -> None:
    """Make the dropout of one training step a function of (seed, epoch, step, rank).

    With it a resumed run draws what the uninterrupted one drew. The generators are
    seeded one by one because torch.manual_seed takes 100 times as long.
    """
    number = seed_from(seed, epoch, step, rank)
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        # Each GPU of one process its own: nn.DataParallel's replicas drop other units
        for device, generator in enumerate(torch.cuda.default_generators):
            generator.manual_seed((number + device) % 2**32)
