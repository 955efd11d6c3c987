"""Random numbers that depend only on a key."""

import random

import numpy
import torch


def seed_from(*key: int) -> int:
    """Hash a key of non-negative integers to a 32-bit seed; PyTorch uses only 32 bits.

    Source:
    https://numpy.org/doc/stable/reference/random/bit_generators/generated/numpy.random.SeedSequence.html
    """
    return int(numpy.random.SeedSequence(key).generate_state(1)[0])


def seed_augmentation(seed: int, epoch: int, index: int) -> None:
    """Make the augmentation of one image depend only on (seed, epoch, index).

    Crops draw from Python's generator, torchvision's transforms from PyTorch's.
    """
    number = seed_from(seed, epoch, index)
    torch.default_generator.manual_seed(number)
    random.seed(number)


def seed_step(seed: int, epoch: int, step: int, rank: int) -> None:
    """Make one training step's dropout depend only on (seed, epoch, step, rank).

    A resumed run then draws the same numbers as an uninterrupted one. Each generator is
    seeded separately, because torch.manual_seed takes 100 times as long.
    """
    number = seed_from(seed, epoch, step, rank)
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        # One seed per GPU, so that nn.DataParallel's replicas drop different units
        for device, generator in enumerate(torch.cuda.default_generators):
            generator.manual_seed((number + device) % 2**32)
