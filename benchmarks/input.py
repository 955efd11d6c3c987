"""Compare the speed of our input pipeline with that of a conventional pipeline.

    python -m benchmarks.input [ROUNDS]

On one core, the benchmark reads single images for training and for validation. On all
cores, it reads batches from a DataLoader with one process per core. It generates JPEG
files, prints median ratios with quartiles and writes benchmarks/results/input.json.
"""

import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, transforms

from benchmarks.comparison import compare, parse_number, pin_core, speed, write_results
from benchmarks.photographs import write_photographs
from common.arguments import build_parser
from common.data import (
    MEAN,
    STD,
    DeviceLoader,
    SeededDataset,
    build_datasets,
    build_loader,
)
from common.errors import one_line_errors

TRAIN, VAL, BATCH = 384, 256, 64
DECODERS = ("torchcodec", "nvimgcodec", "pil")
USUAL = "conventional: Pillow, v1 transforms, float"
NORMALIZED = "--decoder nvimgcodec, normalized on the CPU"
CPU = torch.device("cpu")
# The conventional pipeline: Pillow and torchvision's v1 transforms
NORMALIZE = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
USUAL_TRAIN = transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()
USUAL_VAL = transforms.Resize(256), transforms.CenterCrop(224)


def usual_folder(root: Path, steps: tuple) -> datasets.ImageFolder:
    """Return a dataset of normalized (3, 224, 224) float32 images."""
    chain = transforms.Compose([*steps, transforms.ToTensor(), NORMALIZE])
    return datasets.ImageFolder(str(root), chain)


def arguments(folder: Path, *flags: object) -> Namespace:
    """Return the scripts' flags: their defaults except for `flags`."""
    return build_parser("").parse_args(["--data", str(folder), *map(str, flags)])


def reading(dataset: Dataset, images: int) -> Callable[[], float]:
    """Return a function that measures the speed of reading single images in order."""
    return speed(dataset.__getitem__, range(images))


class Training(SeededDataset):
    """A dataset that starts a new epoch whenever image 0 is read."""

    epoch = 0

    def __getitem__(self, index: int) -> tuple:
        self.epoch += index == 0
        image, label = super().__getitem__((self.epoch, index, index))
        return image.permute(2, 0, 1), label


class Normalized(Dataset):
    """A dataset that normalizes images in float32, as conventional pipelines do."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset
        self.mean, self.std = (torch.tensor(x).view(3, 1, 1) for x in (MEAN, STD))

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.dataset[index][0].float().sub_(self.mean).div_(self.std)


def one_core(folder: Path, rounds: int) -> dict[str, dict]:
    """Measure how fast this process reads single images."""
    cores = pin_core()
    train_set = usual_folder(folder / "train", USUAL_TRAIN)
    val_set = usual_folder(folder / "val", USUAL_VAL)
    training = {USUAL: reading(train_set, TRAIN)}
    validation = {USUAL: reading(val_set, VAL)}
    # These two rows and the conventional ones normalize on the CPU; the others do not
    train_set, val_set = build_datasets(arguments(folder, "--decoder", "nvimgcodec"))
    training[NORMALIZED] = reading(Normalized(Training(train_set, 0)), TRAIN)
    validation[NORMALIZED] = reading(Normalized(val_set), VAL)
    for name in DECODERS:
        train_set, val_set = build_datasets(arguments(folder, "--decoder", name))
        training[f"--decoder {name}"] = reading(Training(train_set, 0), TRAIN)
        validation[f"--decoder {name}"] = reading(val_set, VAL)
    works = {"training": training, "validation": validation}
    rows = {name: compare(f"{name}, one core", works[name], rounds) for name in works}
    os.sched_setaffinity(0, cores)
    return rows


def all_cores(folder: Path, rounds: int) -> dict[str, dict]:
    """Measure how fast this process gets batches from one loader process per core."""
    cores = len(os.sched_getaffinity(0))
    indices = [*range(TRAIN)] * 3

    def epoch_of(loader: Iterable) -> Callable[[], float]:
        def measure() -> float:
            began = time.perf_counter()
            batches = loader.epoch(0) if isinstance(loader, DeviceLoader) else loader
            images = sum(len(labels) for _, labels in batches)
            return images / (time.perf_counter() - began)

        return measure

    def own_loader(decoder: str) -> DeviceLoader:
        args = arguments(folder, "--decoder", decoder, "-b", BATCH, "-j", cores)
        data, place = build_datasets(args)[0], (0, 1, CPU)
        return build_loader(args, data, indices, *place, training=True)

    data = usual_folder(folder / "train", USUAL_TRAIN)
    options = {"num_workers": cores, "persistent_workers": True}
    options |= {"multiprocessing_context": "fork"}  # as in the scripts' loader
    candidates = {USUAL: epoch_of(DataLoader(data, BATCH, sampler=indices, **options))}
    candidates[NORMALIZED] = epoch_of(own_loader("nvimgcodec"))
    for name in DECODERS:
        loader = own_loader(name)
        loader.copy = lambda *batch: batch  # the device would normalize it
        candidates[f"--decoder {name}"] = epoch_of(loader)
    title = f"training, {cores} loader processes on {cores} cores"
    return {"loader": compare(title, candidates, rounds)}


def main() -> None:
    """Run all measurements."""
    rounds = parse_number(__doc__, "ROUNDS", 9)
    with tempfile.TemporaryDirectory() as folder:
        images = write_photographs(Path(folder), TRAIN, VAL)
        print(f"{images}, {rounds} rounds")
        results = one_core(Path(folder), rounds) | all_cores(Path(folder), rounds)
    write_results("input", {"rounds": rounds, "photographs": [images], **results})


if __name__ == "__main__":
    with one_line_errors():
        main()
