"""Datasets, and loaders that copy batches to the device."""

import hashlib
import os
import random
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import FakeData
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes
from torchvision.transforms import v2

from common.errors import UserError
from common.images import RandomResizedCrop, read_image
from common.model import die_with_parent

# Mean and standard deviation of ImageNet's RGB values, for pixels between 0 and 255
MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)


def list_images(root: str, name: str) -> list[bytes]:
    """Return a class's images, as paths below `root`, in torchvision's order.

    The search follows links to folders. Raises UserError if there are no images or if a
    link leads to a loop, and OSError if a folder is unreadable.
    """
    found, errors, top = [], [], f"{root}/{name}"
    for folder, _, files in os.walk(top, followlinks=True, onerror=errors.append):
        above = Path(folder).absolute().parents
        if os.path.islink(folder) and any(map(Path(folder).samefile, above)):
            raise UserError(f"{folder} links to a folder above it; delete this link")
        found += [(folder, x) for x in files if x.lower().endswith(IMG_EXTENSIONS)]
    if errors:
        raise errors[0]
    if not found:
        raise UserError(f"{top} has no images ({' '.join(IMG_EXTENSIONS)}); delete it")
    return [os.fsencode(os.path.join(*image)[len(root) :]) for image in sorted(found)]


class ImageFolder(Dataset):
    """Images in one subfolder per class, or in tar archives of such a folder.

    An item is (image, label): a transformed (3, S, S) uint8 RGB image, and an int.
    `decoder` is one of DECODERS. Raises UserError if a folder or image is unusable.
    """

    def __init__(self, root: Path, transform: v2.Compose, decoder: str):
        self.root = str(root)
        self.transform = transform
        self.decoder = decoder
        self.archives = None
        archives = sorted(root.parent.glob(f"{root.name}.tar"))
        archives = archives or sorted(root.parent.glob(f"{root.name}-*.tar"))
        # Arrays, because each loader process would copy lists: reading an item changes
        # its reference count (https://github.com/pytorch/pytorch/issues/13246)
        if archives and not root.is_dir():
            from common.tar import Archives

            self.archives = Archives(archives)
            self.classes = self.archives.classes
            self.paths, self.labels = self.archives.paths, self.archives.labels
        else:
            try:
                self.classes = find_classes(self.root)[0]
                found = [list_images(self.root, name) for name in self.classes]
            except OSError as error:
                raise UserError(
                    f"{error} (--data needs train/CLASS/*.JPEG and val/CLASS/*.JPEG, "
                    "or train.tar and val.tar; see scripts/prepare_imagenet.sh)"
                ) from None
            self.paths = numpy.array([path for paths in found for path in paths])
            self.labels = numpy.arange(len(found)).repeat([*map(len, found)])
        if (hidden := self.paths[numpy.char.find(self.paths, b"/.") >= 0]).size:
            path = self.root + os.fsdecode(hidden[0])
            raise UserError(f"{path} is hidden; delete it ({hidden.size} are hidden)")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self.root + os.fsdecode(self.paths[index])
        content = self.archives.read(index) if self.archives else None
        image = read_image(path, self.decoder, self.transform, content)
        return image, int(self.labels[index])


def build_datasets(args: Namespace) -> tuple[Dataset, Dataset]:
    """Open the training and validation sets (for --evaluate, the validation set twice).

    Raises UserError if a folder is missing, or if the sets' classes differ.
    """
    size = args.image_size
    if args.synthetic:
        images = args.global_batch_size * (args.max_steps or args.synthetic)
        batches = min(images, args.synthetic) // 25 // args.global_batch_size
        val_images = max(batches, 1) * args.global_batch_size  # 1/25, as in ImageNet
        train_set = FakeData(args.synthetic, (3, size, size), 1000, v2.PILToTensor())
        val_set = FakeData(val_images, (3, size, size), 1000, v2.PILToTensor())
        train_set.classes = val_set.classes = range(1000)
        return train_set, val_set
    # For 224, this is Resize(256) and CenterCrop(224), as in the ResNet paper
    steps = [v2.Resize(size * 256 // 224), v2.CenterCrop(size), v2.PILToTensor()]
    val_set = ImageFolder(Path(args.data, "val"), v2.Compose(steps), args.decoder)
    if args.evaluate:
        return val_set, val_set
    flip = v2.RandomHorizontalFlip(0 if args.no_flip else 0.5)
    crop = RandomResizedCrop(size, scale=(args.min_crop, 1))
    transform = v2.Compose([crop, flip, v2.PILToTensor()])
    train_set = ImageFolder(Path(args.data, "train"), transform, args.decoder)
    if different := sorted(set(train_set.classes) ^ set(val_set.classes)):
        folder = "val" if different[0] in train_set.classes else "train"
        raise UserError(f"{args.data}: {folder}/ has no class {different[0]}")
    return train_set, val_set


def fingerprint(dataset: Dataset) -> list[int]:
    """Return the number of images, and a digest of their known paths and labels."""
    digest = hashlib.blake2b(digest_size=6)
    # Subset has indices; most of torchvision's datasets have targets
    for name in ("paths", "labels", "targets", "indices"):
        digest.update(numpy.asarray(getattr(dataset, name, ())).tobytes())
    return [len(dataset), int.from_bytes(digest.digest(), "big")]


def seed_generators(*key: int) -> None:
    """Seed Python's, NumPy's and PyTorch's generators from non-negative integers.

    A zero at the end of `key` has no effect, so the scripts append rank + 1, not rank.
    Source: https://numpy.org/doc/stable/reference/random/parallel.html
    """
    number = int(numpy.random.SeedSequence(key).generate_state(1)[0])
    random.seed(number)
    numpy.random.seed(number)
    # torch.manual_seed() would take 100 times as long while CUDA is not in use
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


class EpochSampler:
    """Yields (seed, epoch, position in the epoch, index) for this process's images."""

    def __init__(self, share: Sequence[int], seed: int, rank: int, world_size: int):
        """`share` yields this process's indices, every world_size-th in the epoch."""
        self.share, self.seed = share, seed
        self.rank, self.world_size = rank, world_size
        self.epoch, self.first, self.length = 0, 0, len(share)

    def __len__(self) -> int:
        return self.length  # images of this process in a complete epoch

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        """Set the epoch; a resumed run must `skip` some of this process's images."""
        self.epoch, self.first = epoch, skip
        # Some samplers, such as WeightedRandomSampler, draw from PyTorch's generator
        seed_generators(self.seed, epoch, 0, self.rank + 1)
        if hasattr(self.share, "set_epoch"):
            self.share.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        positions = count(self.rank, self.world_size)
        keys = zip(repeat(self.seed), repeat(self.epoch), positions, self.share)
        return islice(keys, self.first, self.length)


class SeededDataset(Dataset):
    """A dataset of (S, S, 3) images; EpochSampler's keys seed their augmentation."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __getitem__(self, key: tuple[int, int, int, int]) -> Any:
        *key, index = key
        seed_generators(*key)
        image, label = self.dataset[index]
        shape = image.shape if torch.is_tensor(image) else ()
        if len(shape) != 3 or image.dtype != torch.uint8 or shape[0] != 3:
            text = f"image {index} is not a uint8 tensor (3, S, S)"
            raise UserError(f"{text}: omit ToTensor() and Normalize()")
        # In the decoders' own layout, batches are copied and normalized faster
        return image.permute(1, 2, 0), label


class DeviceLoader(DataLoader):
    """Device batches: normalized float32 images (B, 3, S, S) and int64 labels (B,)."""

    def __init__(
        self,
        args: Namespace,
        dataset: Dataset,
        sampler: EpochSampler,
        batch_size: int,
        device: torch.device,
        training: bool,
    ):
        """Start the loader processes; raise UserError if there is no batch."""
        if training and args.max_steps:
            sampler.length = min(len(sampler), batch_size * args.max_steps)
        unused = training and args.evaluate
        if len(sampler) < (batch_size if training else 1) and not unused:
            raise UserError(
                f"{len(dataset)} {'training' if training else 'validation'} images are "
                f"too few for -b and {sampler.world_size} processes: lower one of them"
            )
        workers = 0 if args.synthetic or unused else args.workers
        super().__init__(
            SeededDataset(dataset),
            batch_size=batch_size,
            sampler=sampler,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            drop_last=training,
            worker_init_fn=lambda worker: die_with_parent(),
            persistent_workers=workers > 0,
            multiprocessing_context="fork" if workers else None,  # takes milliseconds
        )
        if workers:
            # Start the loader processes before the first collective, whose threads may
            # hold a lock for which a forked process would wait forever
            sampler.first = len(sampler)  # load no image yet
            super().__iter__()
            sampler.first = 0
        self.device, self.rank = device, sampler.rank
        self.mean = torch.tensor(MEAN, device=device).view(1, 3, 1, 1)
        self.std = torch.tensor(STD, device=device).view(1, 3, 1, 1)
        self.waited = 0.0  # seconds spent waiting for data in this epoch
        self.batch = None  # the only batch of --synthetic
        if args.synthetic and not unused:
            self.batch = self.copy(*next(super().__iter__()))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of an epoch; raise UserError if an image is unusable."""
        self.waited = 0.0
        if self.batch is not None:
            first = self.sampler.first // self.batch_size
            yield from repeat(self.batch, len(self) - first)
            return
        began = time.perf_counter()
        for images, labels in super().__iter__():
            self.waited += time.perf_counter() - began
            yield self.copy(images, labels)
            began = time.perf_counter()

    def copy(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Copy a batch to the device and normalize its images, which must be uint8."""
        images = images.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
        images = images.to(torch.float32, memory_format=torch.channels_last)
        labels = labels.to(self.device, non_blocking=True)
        return images.sub_(self.mean).div_(self.std), labels
