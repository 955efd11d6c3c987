"""Images: the folder, decoding, augmentation, and batches on the device."""

import argparse
import atexit
import gc
import hashlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, default_collate
from torchvision.datasets.folder import (
    IMG_EXTENSIONS,
    has_file_allowed_extension,
    make_dataset,
)

from launch.cores import own_cores
from common.errors import ImageError, UserError, end_children
from common.images import (
    Picture,
    TrainTransform,
    ValTransform,
    choose_decoder,
    read_image,
)
from common.launch import Watchdog
from launch.limits import PREFETCH, check_limits
from common.model import pretrained_normalisation, validation_protocol
from common.seeding import seed_augmentation

# Mean and standard deviation of ImageNet's RGB values, for pixels between 0 and 255
MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)
MOST_WORKERS = 16  # loader processes of a training process, by default


# --- data sets ---


def digest_of(*parts: bytes) -> int:
    """48 bits that stand for the content of some buffers: a float64 holds them."""
    digest = hashlib.blake2b(digest_size=6)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "big")


class PackedPaths:
    """Paths below one folder, in one array of bytes.

    A Python list of 1.3 million of them is copied page by page into every loader
    process, as its reference counts are touched
    (https://github.com/pytorch/pytorch/issues/13246).
    """

    def __init__(self, root: str, paths: Iterable[str]):
        """Pack `paths`, all of which begin with `root`."""
        packed, ends = bytearray(), array("q")
        for path in paths:
            packed += os.fsencode(path[len(root) :])
            ends.append(len(packed))
        self.root = root
        self.ends = numpy.array(ends)
        self.bytes = numpy.array(packed)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        start = self.ends[index - 1] if index else 0
        return self.root + os.fsdecode(self.bytes[start : self.ends[index]].tobytes())

    def digest(self, count: int) -> int:
        """48 bits that stand for the first `count` paths, as they are below `root`."""
        ends = self.ends[:count]
        return digest_of(ends, self.bytes[: ends[-1] if count else 0])


class ImageFolder(Dataset):
    """Images in one sub-folder per class, decoded to RGB and transformed.

    An item is (image, label): a (3, H, W) uint8 tensor and an int.
    """

    def __init__(
        self,
        root: Path,
        classes: Sequence[str],
        transform: Callable[[Picture], Tensor],
        decoder: str,
    ):
        """Index the folder.

        Args:
            root: holds one folder for each of `classes`.
            classes: folder names; the position of a name is its label.
            transform: maps an opened picture to a tensor of fixed size.
            decoder: "torchvision", "nvimgcodec" or "pil".

        Raises:
            UserError: a class folder has no image.
        """
        per_class = numpy.zeros(len(classes), dtype=numpy.int64)

        def found() -> Iterator[str]:
            for label, name in enumerate(classes):
                samples = make_dataset(
                    str(root), {name: label}, IMG_EXTENSIONS, allow_empty=True
                )
                per_class[label] = len(samples)
                yield from (path for path, _ in samples)

        self.classes = classes
        self.paths = PackedPaths(str(root), found())
        self.labels = numpy.arange(len(classes)).repeat(per_class)
        self.transform = transform
        self.decoder = decoder
        refuse_empty(
            root, [classes[label] for label in numpy.flatnonzero(per_class == 0)]
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = read_image(self.paths[index], self.decoder, self.transform)
        return image, int(self.labels[index])


class RandomImages(Dataset):
    """Random (3, S, S) uint8 images in place of a folder, always the same."""

    def __init__(self, length: int, image_size: int):
        self.classes = [str(number) for number in range(1000)]
        self.length = length
        self.image_size = image_size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        shape = (3, self.image_size, self.image_size)
        return torch.randint(
            256, shape, dtype=torch.uint8, generator=generator
        ), index % 1000


def build_datasets(args: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """Open the training and the validation images that the arguments name.

    Raises:
        UserError: a folder is missing or empty, the classes differ, there are fewer
            training images than one global batch, or this machine's limits are too
            low for the loader processes.
    """
    train_set, val_set = open_datasets(args)
    check_counts(args, len(train_set), len(val_set))
    return train_set, val_set


def check_datasets(args: argparse.Namespace) -> int:
    """Look for the mistakes that build_datasets finds; returns the number of classes.

    Of each folder it lists no more than it has to: one image per class, and as many in
    all as loader processes hold at a time. Comes after share_out().

    Raises:
        UserError: as build_datasets.
    """
    if args.synthetic:
        return len(build_datasets(args)[0].classes)
    folders, classes = open_folders(args)
    enough = (PREFETCH * args.per_process_workers + 2) * args.global_batch_size
    check_counts(args, *(count_images(root, classes, enough) for root in folders))
    return len(classes)


def check_counts(args: argparse.Namespace, train_images: int, val_images: int) -> None:
    """Raise a UserError where there are too few images, or no room for their batches.

    Counts of more than loader processes hold at a time make no difference.
    """
    if train_images < args.global_batch_size and not args.evaluate:
        raise UserError(
            f"{train_images} training images are less than one global batch of "
            f"{args.global_batch_size}; lower --global-batch-size"
        )
    if not args.synthetic and "local_world_size" in args:  # from share_out()
        most = (args.max_steps or train_images) * args.global_batch_size
        check_limits(args, 0 if args.evaluate else min(train_images, most), val_images)


def open_datasets(args: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """Open the images whatever their number; raises what build_datasets does."""
    size = args.image_size
    if args.synthetic:
        # ImageNet has 25.6 training images for each validation image
        return RandomImages(args.synthetic, size), RandomImages(
            max(1, args.synthetic // 25), size
        )
    (train_folder, val_folder), classes = open_folders(args)
    train_transform = TrainTransform(size, args.min_crop, flip=not args.no_flip)
    val_transform = ValTransform(*validation_protocol(args))
    return (
        ImageFolder(train_folder, classes, train_transform, args.decoder),
        ImageFolder(val_folder, classes, val_transform, args.decoder),
    )


def open_folders(args: argparse.Namespace) -> tuple[tuple[Path, Path], list[str]]:
    """The training and the validation folder, and their classes; settles the decoder.

    Raises:
        UserError: there is no such folder, or the classes or the decoder do not fit.
    """
    train_folder, val_folder = Path(args.data, "train"), Path(args.data, "val")
    classes = class_folders(train_folder)
    different = sorted(set(classes) ^ set(class_folders(val_folder)))
    if different:
        names = ", ".join(different[:3]) + (" ..." if len(different) > 3 else "")
        raise UserError(
            f"{args.data}: train/ and val/ must have the same class folders; "
            f"{len(different)} are in one of them only: {names}"
        )
    args.decoder = choose_decoder(args.decoder)
    return (train_folder, val_folder), classes


def class_folders(root: Path) -> list[str]:
    """Names of the class folders below `root`, sorted.

    Raises:
        UserError: there is no such folder, or nothing in it.
    """
    try:
        classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    except OSError as error:
        raise UserError(
            f"cannot open the folder {root}: {error.strerror}; --data names a folder "
            "with train/CLASS/*.JPEG and val/CLASS/*.JPEG"
        ) from None
    if not classes:
        raise UserError(f"{root} has no class folders; expected {root}/CLASS/*.JPEG")
    return classes


def count_images(root: Path, classes: Sequence[str], enough: int) -> int:
    """The number of images in the class folders of `root`, counted up to `enough`.

    Raises:
        UserError: a class folder has no image.
    """
    count, empty = 0, []
    for name in classes:
        found = sum(1 for _ in islice(image_files(root / name), max(1, enough - count)))
        count += found
        if not found:
            empty.append(name)
    refuse_empty(root, empty)
    return count


def image_files(folder: str | Path) -> Iterator[str]:
    """Paths of the images below a folder, listed no further than they are asked for."""
    below = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    below.append(entry.path)
                elif has_file_allowed_extension(entry.name, IMG_EXTENSIONS):
                    yield entry.path
    except OSError:  # make_dataset passes over such a folder too
        return
    for path in below:
        yield from image_files(path)


def refuse_empty(root: Path, classes: Sequence[str]) -> None:
    """Raise a UserError that names the first of `classes`, if there are any."""
    if classes:
        raise UserError(f"{root}: no image in class folder {', '.join(classes[:3])}")


# --- which image when ---


class EpochBatches:
    """Batches of (epoch, index) keys from a stock sampler, from batch `first` on.

    The keys carry the epoch to loader processes that live longer than one.
    """

    def __init__(
        self, sampler: Iterable[int], batch_size: int, drop_last: bool, most: int | None
    ):
        self.sampler = sampler
        self.batches = BatchSampler(sampler, batch_size, drop_last)
        self.first = 0
        self.most = most

    def __len__(self) -> int:
        return (
            len(self.batches)
            if self.most is None
            else min(self.most, len(self.batches))
        )

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        if self.first >= len(self):
            return
        epoch = getattr(self.sampler, "epoch", 0)  # set by DistributedSampler.set_epoch
        for batch in islice(self.batches, self.first, len(self)):
            yield [(epoch, index) for index in batch]


class SeededDataset(Dataset):
    """Looks a data set up by (epoch, index), the augmentation seeded by that key."""

    def __init__(self, dataset: Dataset, seed: int):
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int] | ImageError:
        epoch, index = key
        seed_augmentation(self.seed, epoch, index)
        # Errors are raised in the training process, without the worker's traceback
        try:
            item = self.dataset[index]
        except ImageError as error:
            return error
        if fits(item):
            return item
        return ImageError(
            f"item {index} of {type(self.dataset).__name__} is {described(item)}, but "
            "it has to be a pair of a uint8 tensor (3, S, S) and an int label: images "
            "are normalised later, on the device"
        )


def fits(item: Any) -> bool:
    """Whether an item of a data set is a (3, S, S) uint8 image with an int label."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        return False
    image, label = item
    if isinstance(label, Tensor) and label.dtype == torch.int64 and not label.ndim:
        label = int(label)  # as in a TensorDataset
    return (
        isinstance(image, Tensor)
        and image.dtype == torch.uint8
        and image.ndim == 3
        and image.shape == (3, image.shape[2], image.shape[2])
        and isinstance(label, int | numpy.integer)
    )


def described(item: Any) -> str:
    """What an item of a data set is, in words."""
    if isinstance(item, Tensor):
        return f"a {str(item.dtype).removeprefix('torch.')} tensor {tuple(item.shape)}"
    if isinstance(item, tuple | list) and len(item) <= 3:
        return f"({', '.join(map(described, item))})"
    return f"of type {type(item).__name__}"


def collate(samples: list) -> list[Tensor] | ImageError:
    """Stack into (B, 3, S, S) uint8 images and (B,) int64 labels; errors go first."""
    errors = [sample for sample in samples if isinstance(sample, ImageError)]
    if errors:
        return errors[0]
    sizes = {image.shape[-1] for image, _ in samples}
    if len(sizes) > 1:
        one, other, *_ = sorted(sizes)
        return ImageError(
            f"a batch has images of {one} and of {other} pixels: the data set has to "
            "resize all of them to one size"
        )
    # Decoders leave the three values of a pixel side by side. So does the batch: it is
    # copied faster, and is in channels_last format already
    pixels = [(image.permute(1, 2, 0), label) for image, label in samples]
    images, labels = default_collate(pixels)
    return [images.permute(0, 3, 1, 2), labels]


def settle_worker(worker: int) -> None:
    """Tie a loader process to its training process: it lives as long, and no longer.

    Ctrl-C and the like are left to the training process, which saves and then ends.
    Where that one is killed, a worker that came from a fork server would not notice:
    its parent is the server.
    """
    for number in Watchdog.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # For connections that break when the trainer is killed; what goes wrong with an
    # image reaches the trainer by another way
    sys.excepthook = lambda *_: None
    threading.Thread(target=end_with_trainer, daemon=True).start()


def end_with_trainer() -> None:
    """Wait for the end of the training process, then end this one."""
    multiprocessing.parent_process().join()
    os._exit(1)


# --- loaders ---


class DeviceLoader:
    """Batches on the device: (B, 3, S, S) normalised float32 and (B,) int64 labels.

    `wait_seconds` adds up how long the device had nothing to do but wait for data.
    """

    def __init__(
        self, loader: Iterable, batches: EpochBatches, device: torch.device, layout
    ):
        self.loader = loader
        self.batches = batches
        self.device = device
        self.layout = layout
        self.mean = torch.tensor(MEAN, device=device).view(1, 3, 1, 1)
        self.std = torch.tensor(STD, device=device).view(1, 3, 1, 1)
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.waits: list = []
        self.first_step = 0  # batches to skip, where a resumed epoch goes on

    def __len__(self) -> int:
        """Batches of a whole epoch, wherever iteration begins."""
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.batches.first = self.first_step
        self.waits.clear()
        batches = map(self._send, self.loader)
        if self.copies is not None:
            # The copy of the next batch begins before this one is handed out: a step
            # that the host waits for would delay it
            batches = (batch for batch, _ in pairwise(chain(batches, [None])))
        while True:
            idle_from = self._now()
            batch = next(batches, None)
            if batch is None:
                return
            images, labels = self._receive(*batch)
            self.waits.append((idle_from, self._now()))
            yield self.normalise(images), labels

    def normalise(self, images: Tensor) -> Tensor:
        """(B, 3, S, S) uint8 on the device -> float32, zero mean and unit variance."""
        images = images.to(torch.float32, memory_format=self.layout)
        return images.sub_(self.mean).div_(self.std)

    def wait_seconds(self) -> float:
        """Seconds the device waited for data since the last call; call it when idle."""
        if self.device.type == "cuda":
            total = sum(start.elapsed_time(end) for start, end in self.waits) / 1000
        else:
            total = sum(end - start for start, end in self.waits)
        self.waits.clear()
        return total

    def _send(self, batch: list[Tensor] | ImageError) -> tuple:
        """Begin to copy a batch; returns (images, labels, event of their arrival)."""
        if isinstance(batch, ImageError):
            raise batch
        images, labels = batch
        if self.copies is None:
            return images, labels, None
        # A stream of its own lets the copy run while the step before it computes
        with torch.cuda.stream(self.copies):
            images = images.to(self.device, non_blocking=True)
            labels = labels.to(self.device, non_blocking=True)
        return images, labels, self.copies.record_event()

    def _receive(
        self, images: Tensor, labels: Tensor, arrival
    ) -> tuple[Tensor, Tensor]:
        """Have what the device computes next wait for a batch, and for no later one."""
        if arrival is not None:
            compute = torch.cuda.current_stream(self.device)
            compute.wait_event(arrival)
            # Their memory is not to be used again before the step is done
            images.record_stream(compute)
            labels.record_stream(compute)
        return images, labels

    def _now(self):
        """A moment as the device sees it: between two kernels, or on the clock."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


class RepeatedBatch(DeviceLoader):
    """The first batch of a sampler again and again, on the device from the start."""

    def __init__(
        self, dataset: Dataset, batches: EpochBatches, device: torch.device, layout
    ):
        super().__init__(dataset, batches, device, layout)
        first = next(iter(batches), [(0, 0)])  # of epoch 0, also in a resumed run
        images, labels = collate([dataset[index] for _, index in first])
        self.images = self.normalise(images.to(device))
        self.labels = labels.to(device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.batches.first = self.first_step
        for batch in self.batches:
            yield self.images[: len(batch)], self.labels[: len(batch)]


def build_loader(
    args: argparse.Namespace,
    dataset: Dataset,
    sampler: Iterable[int],
    device: torch.device,
    training: bool,
) -> DeviceLoader:
    """Make the loader of one process.

    Args:
        dataset: stock data set; its items are (3, S, S) uint8 image and int label.
        sampler: this process's indices; DistributedSampler, or any sequence.
        device: where batches go.
        training: drop the last incomplete batch, and end after --max-steps batches.
    """
    layout = torch.contiguous_format if args.no_channels_last else torch.channels_last
    most = args.max_steps if training else None
    batches = EpochBatches(sampler, args.per_process_batch_size, training, most)
    if isinstance(dataset, RandomImages):
        return RepeatedBatch(dataset, batches, device, layout)
    loader = DataLoader(
        SeededDataset(dataset, args.seed),
        batch_sampler=batches,
        num_workers=args.per_process_workers,
        collate_fn=collate,
        pin_memory=device.type == "cuda",
        persistent_workers=args.per_process_workers > 0,
        worker_init_fn=settle_worker,
    )
    if args.per_process_workers:
        start_workers(loader, batches)
    on_device = DeviceLoader(loader, batches, device, layout)
    if args.pretrained:
        mean, std = pretrained_normalisation(args.arch)
        on_device.mean.copy_(mean)
        on_device.std.copy_(std)
    return on_device


def start_workers(loader: DataLoader, batches: EpochBatches) -> None:
    """Start the loader processes now, with nothing to load yet.

    They are forks of this process, or of a fork server, which has no such trouble. Once
    this process trains, threads of a communication library enter and leave the
    interpreter at any moment; a fork while one of them holds the interpreter's lock on
    its threads makes a child that waits for that lock for ever
    (https://github.com/python/cpython/issues/112275).

    What lies in memory by then is taken out of the garbage collector's rounds, which
    write into every object: pages that are never written stay shared for good
    (https://docs.python.org/3/library/gc.html#gc.freeze).
    """
    batches.first = len(batches)
    gc.freeze()
    atexit.register(gc.unfreeze)  # or libraries report leaks at the end
    iter(loader)  # persistent workers: the next iter() goes on with the same ones
    atexit.register(end_children)


def share_out(
    args: argparse.Namespace, local_rank: int, world_size: int, local_world_size: int
) -> None:
    """Set this process's part of the batch and of the machine's loader processes.

    `args.per_process_batch_size` and `args.per_process_workers`; where the loader
    processes cannot be divided evenly, the first training processes have one more.
    Without --workers each has as many as it has cores, at most MOST_WORKERS, and
    `args.workers` becomes their total.
    `args.world_size` and `args.local_world_size` remember the number of parts.

    Raises:
        UserError: the global batch cannot be divided evenly.
    """
    size, rest = divmod(args.global_batch_size, world_size)
    if rest or not size:
        nearest = max(1, round(args.global_batch_size / world_size)) * world_size
        raise UserError(
            f"--global-batch-size {args.global_batch_size} cannot be divided evenly by "
            f"{world_size} processes; the nearest that can is {nearest}"
        )
    if args.workers is None:
        args.workers = min(MOST_WORKERS, own_cores(local_world_size)) * local_world_size
    workers, rest = divmod(args.workers, local_world_size)
    args.world_size, args.local_world_size = world_size, local_world_size
    args.per_process_batch_size = size
    args.per_process_workers = workers + (local_rank < rest)
