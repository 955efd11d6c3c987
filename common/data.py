"""Datasets, and loaders that copy batches to the device."""

import argparse
import atexit
import gc
import hashlib
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, default_collate
from torchvision.datasets import FakeData
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset
from torchvision.transforms.v2.functional import pil_to_tensor

from common.errors import SIGNALS, ImageError, UserError, end_children
from common.images import Picture, TrainTransform, ValTransform, read_image
from common.model import pretrained_normalization, validation_protocol
from common.seeding import seed_augmentation
from common.tar import Archives, archives_of

# Mean and standard deviation of the RGB values, for pixels between 0 and 255
MEAN = (123.675, 116.28, 103.53)  # ImageNet's
STD = (58.395, 57.12, 57.375)
PREFETCH = 2  # batches that DataLoader asks of each worker ahead of time
MOST_OPEN_FILES = 65536  # each batch from a loader process takes two


# --- datasets ---


def digest_of(content: Any) -> int:
    """A buffer's 48-bit digest, which a float64 represents exactly."""
    digest = hashlib.blake2b(content, digest_size=6).digest()
    return int.from_bytes(digest, "big")


def fingerprint(dataset: Dataset) -> list[int | None]:
    """The number of images and, for an ImageFolder, a digest of their names."""
    names = dataset.paths if isinstance(dataset, ImageFolder) else None
    return [len(dataset), None if names is None else digest_of(names.view("uint8"))]


class ImageFolder(Dataset):
    """Images in one subfolder per class, or in tar archives of such a folder.

    An item is (image, label): a transformed (3, H, W) uint8 RGB image, and an int. An
    unreadable image raises ImageError.
    """

    def __init__(
        self,
        root: Path,
        classes: Sequence[str],
        transform: Callable[[Picture], Tensor],
        decoder: str,
    ):
        """Index the folder `root`; a label is an index into `classes`.

        `decoder` is a key of DECODERS. Raises UserError if a class has no images.
        """
        self.root = str(root)
        self.classes = classes
        self.transform = transform
        self.decoder = decoder
        self.archives = Archives(root) if archives_of(root) else None
        if self.archives:
            self.root += "*.tar"
            self.paths, self.labels = self.archives.paths, self.archives.labels
            return
        labels = {name: label for label, name in enumerate(classes)}
        try:
            samples = make_dataset(self.root, labels, IMG_EXTENSIONS)
        except FileNotFoundError as error:  # a class has no images
            raise UserError(f"{root}: {str(error)[:200]}") from None
        # Not lists: reading an item changes its reference count, so each loader process
        # would copy the list (https://github.com/pytorch/pytorch/issues/13246)
        names = [os.fsencode(path[len(self.root) :]) for path, _ in samples]
        self.paths = numpy.array(names)
        self.labels = numpy.array([label for _, label in samples], numpy.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self.root + os.fsdecode(self.paths[index])
        read = partial(self.archives.read, index) if self.archives else None
        image = read_image(path, self.decoder, self.transform, read)
        return image, int(self.labels[index])


class RandomImages(FakeData):
    """Random (3, S, S) uint8 images that are the same in every run."""

    classes = [str(label) for label in range(1000)]

    def __init__(self, length: int, image_size: int):
        shape = (3, image_size, image_size)
        super().__init__(length, shape, len(self.classes), pil_to_tensor)


def build_datasets(args: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """Open the training and validation datasets.

    Raises UserError if a folder is missing or empty, or if their classes differ.
    """
    size = args.image_size
    if args.synthetic:
        # ImageNet has 25.6 training images for each validation image
        val_images = max(args.global_batch_size, args.synthetic // 25)
        return RandomImages(args.synthetic, size), RandomImages(val_images, size)
    (train_folder, val_folder), classes = open_folders(args)
    train_transform = TrainTransform(size, args.min_crop, flip=not args.no_flip)
    val_transform = ValTransform(*validation_protocol(args))
    return (
        ImageFolder(train_folder, classes, train_transform, args.decoder),
        ImageFolder(val_folder, classes, val_transform, args.decoder),
    )


def open_folders(args: argparse.Namespace) -> tuple[tuple[Path, Path], list[str]]:
    """Return train/, val/ and their classes; raises UserError if the classes differ."""
    folders = Path(args.data, "train"), Path(args.data, "val")
    classes, val_classes = map(class_folders, folders)
    different = sorted(set(classes) ^ set(val_classes))
    if different:
        names = ", ".join(different[:3]) + (" ..." if len(different) > 3 else "")
        raise UserError(
            f"{args.data}: train/ and val/ must have the same class folders; "
            f"{len(different)} found in only one of them: {names}"
        )
    return folders, classes


def class_folders(root: Path) -> list[str]:
    """Return the sorted class folders in `root`; raises UserError if it has none."""
    if archives_of(root):
        return Archives(root).classes()
    try:
        return find_classes(root)[0]
    except OSError as error:
        raise UserError(
            f"cannot open the folder {root}: {error.strerror or error}; --data must be "
            "a folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG, or train.tar and "
            "val.tar"
        ) from None


# --- the order of the images ---


class EpochBatches:
    """Batches of (epoch, index) keys from a PyTorch sampler, starting at batch `first`.

    The keys carry the epoch to loader processes, which run for several epochs.
    """

    def __init__(
        self, sampler: Iterable[int], batch_size: int, drop_last: bool, most: int | None
    ):
        self.sampler = sampler
        self.batches = BatchSampler(sampler, batch_size, drop_last)
        self.first = 0
        self.most = most

    def __len__(self) -> int:
        return min(self.most or len(self.batches), len(self.batches))

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        if self.first >= len(self):
            return
        epoch = getattr(self.sampler, "epoch", 0)  # set by DistributedSampler.set_epoch
        for batch in islice(self.batches, self.first, len(self)):
            yield [(epoch, index) for index in batch]


class SeededDataset(Dataset):
    """A dataset with (epoch, index) keys; a key also seeds the augmentation."""

    def __init__(self, dataset: Dataset, seed: int):
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        seed_augmentation(self.seed, epoch, index)
        try:
            return self.dataset[index]
        except ImageError as error:
            return error  # DeviceLoader raises it, without the worker's traceback


def collate(items: list) -> list[Tensor] | ImageError:
    """Return (B, 3, S, S) uint8 images and (B,) int64 labels, or an ImageError."""
    for item in items:
        if isinstance(item, ImageError):
            return item
        if not is_image_and_label(item):
            return ImageError(
                f"a dataset item is {described(item)}, but it must be a pair of a "
                "uint8 tensor (3, S, S) and an int label; images are normalized "
                "later, on the device"
            )
    sizes = sorted({image.shape[-1] for image, _ in items})
    if len(sizes) > 1:
        return ImageError(
            f"a batch has images of {sizes[0]} px and {sizes[1]} px: the dataset must "
            "resize all images to the same size"
        )
    # Decoders store a pixel's three values next to each other. A batch that keeps this
    # order can be copied faster, and is already in channels_last format
    images, labels = default_collate(
        [(image.permute(1, 2, 0), label) for image, label in items]
    )
    return [images.permute(0, 3, 1, 2), labels]


def is_image_and_label(item: Any) -> bool:
    """Whether an item is a pair of a square uint8 RGB image and an int label."""
    match item:
        case [Tensor(dtype=torch.uint8, shape=[3, height, width]), label]:
            if isinstance(label, Tensor) and label.dtype == torch.int64:
                label = label.tolist()  # as in a TensorDataset
            return height == width and isinstance(label, int | numpy.integer)
    return False


def described(item: Any) -> str:
    """Describe a dataset item in words."""
    if isinstance(item, Tensor):
        return f"a {str(item.dtype).removeprefix('torch.')} tensor {tuple(item.shape)}"
    if isinstance(item, tuple | list):
        return f"({', '.join(map(described, item))})"
    return f"of type {type(item).__name__}"


def settle_worker(worker: int) -> None:
    """Make a loader process exit when its training process does, and not before.

    It ignores signals, because the training process saves first. It also watches the
    training process, because its parent process may be a fork server.
    """

    def end_with_trainer() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # importing nvImageCodec could open a GPU
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    sys.excepthook = lambda *_: None  # no traceback if the trainer is killed
    threading.Thread(target=end_with_trainer, daemon=True).start()


# --- loaders ---


class DeviceLoader:
    """Batches on the device: (B, 3, S, S) normalized float32 and (B,) int64 labels.

    Iterating raises ImageError if an image is unusable.
    """

    def __init__(
        self,
        loader: Iterable,
        batches: EpochBatches,
        device: torch.device,
        layout: torch.memory_format,
    ):
        self.loader = loader
        self.batches = batches
        self.device = device
        self.layout = layout
        self.mean = torch.tensor(MEAN, device=device).view(1, 3, 1, 1)
        self.std = torch.tensor(STD, device=device).view(1, 3, 1, 1)
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.waits: list = []
        self.first_step = 0  # batches to skip when an epoch is resumed

    def __len__(self) -> int:
        """The number of batches in a whole epoch, even in a resumed one."""
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.batches.first = self.first_step
        self.waits.clear()
        batches = map(self._send, self.loader)
        if self.copies is not None:
            # Start copying the next batch before yielding this one; otherwise a step
            # that blocks the host would delay the copy
            batches = (batch for batch, _ in pairwise(chain(batches, [None])))
        while True:
            idle_from = self._now()
            batch = next(batches, None)
            if batch is None:
                return
            images, labels, arrival = batch
            if arrival is not None:
                # Make subsequent work on the device wait for this batch, whose memory
                # the allocator must not reuse before the step ends
                compute = torch.cuda.current_stream(self.device)
                compute.wait_event(arrival)
                images.record_stream(compute)
                labels.record_stream(compute)
            self.waits.append((idle_from, self._now()))
            yield self.normalize(images), labels

    def normalize(self, images: Tensor) -> Tensor:
        """(B, 3, S, S) uint8 on the device -> float32, zero mean and unit variance."""
        images = images.to(torch.float32, memory_format=self.layout)
        return images.sub_(self.mean).div_(self.std)

    def wait_seconds(self) -> float:
        """Seconds of waiting for data since the last call; the device must be idle."""
        waits, self.waits = self.waits, []
        if self.device.type == "cuda":
            return sum(start.elapsed_time(end) for start, end in waits) / 1000
        return sum(end - start for start, end in waits)

    def _send(self, batch: list[Tensor] | ImageError) -> tuple:
        """Start copying a batch; return (images, labels, arrival event)."""
        if isinstance(batch, ImageError):
            raise batch
        images, labels = batch
        if self.copies is None:
            return images, labels, None
        # On its own stream, the copy overlaps with the previous step
        with torch.cuda.stream(self.copies):
            images = images.to(self.device, non_blocking=True)
            labels = labels.to(self.device, non_blocking=True)
        return images, labels, self.copies.record_event()

    def _now(self) -> Any:
        """The current time: a CUDA event on a GPU, the clock on a CPU."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


class RepeatedBatch(DeviceLoader):
    """The sampler's first batch, repeated, on the device from the start."""

    def __init__(self, dataset: Dataset, batches: EpochBatches, *where: Any):
        super().__init__(dataset, batches, *where)
        first = next(iter(batches), [(0, 0)])  # of epoch 0, even in a resumed run
        images, labels = collate([dataset[index] for _, index in first])
        self.images = self.normalize(images.to(self.device))
        self.labels = labels.to(self.device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.batches.first = self.first_step
        for batch in self.batches:
            yield self.images[: len(batch)], self.labels[: len(batch)]


def build_loader(
    args: argparse.Namespace,
    dataset: Dataset,
    sampler: Iterable[int],
    batch_size: int,
    workers: int,
    device: torch.device,
    training: bool,
) -> DeviceLoader:
    """Build one process's loader; raises UserError if the images do not fill a batch.

    Args:
        dataset: each item is a (3, S, S) uint8 image and an int label.
        sampler: this process's indices, as a DistributedSampler or any sequence.
        batch_size: this process's images per step.
        workers: this process's loader processes; with 0, it loads the data itself.
        training: drop the last incomplete batch, and end after --max-steps batches.
    """
    if training and len(dataset) < args.global_batch_size and not args.evaluate:
        raise UserError(
            f"{len(dataset)} training images do not fill one global batch of "
            f"{args.global_batch_size}; lower --global-batch-size"
        )
    layout = torch.contiguous_format if args.no_channels_last else torch.channels_last
    most = args.max_steps if training else None
    batches = EpochBatches(sampler, batch_size, training, most)
    if isinstance(dataset, RandomImages):
        return RepeatedBatch(dataset, batches, device, layout)
    loader = DataLoader(
        SeededDataset(dataset, args.seed),
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=device.type == "cuda",
        persistent_workers=workers > 0,
        worker_init_fn=settle_worker,
    )
    if workers:
        start_workers(loader, batches)
    on_device = DeviceLoader(loader, batches, device, layout)
    if args.pretrained:
        mean, std = pretrained_normalization(args.arch)
        on_device.mean.copy_(mean)
        on_device.std.copy_(std)
    return on_device


def start_workers(loader: DataLoader, batches: EpochBatches) -> None:
    """Start the loader processes now, before there is anything to load.

    A later fork can deadlock: if another thread, for example a communication library's,
    holds an interpreter lock during the fork, the child process never gets the lock
    (https://github.com/python/cpython/issues/112275).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, min(hard, MOST_OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    # Garbage collection writes to every object that it visits, and a process copies the
    # memory pages that it writes to: https://docs.python.org/3/library/gc.html#gc.freeze
    gc.freeze()
    atexit.register(gc.unfreeze)  # otherwise libraries report leaks at exit
    batches.first = len(batches)  # nothing to load yet
    iter(loader)  # persistent workers: the next iter() reuses them
    atexit.register(end_children)
