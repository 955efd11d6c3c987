"""Images per second from the input pipeline, compared with a conventional pipeline.

    python -m benchmarks.input [ROUNDS]

On one core, it reads single images for training and validation. On all cores, it reads
batches from a DataLoader with one process per core. It creates its own JPEG files,
prints median ratios with their quartiles and writes results/input.json.
"""

import os
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks import usual
from benchmarks.comparison import compared, interleave, print_rows, write_results
from benchmarks.photographs import write_photographs
from common.data import (
    MEAN,
    STD,
    DeviceLoader,
    SeededDataset,
    build_datasets,
    build_loader,
)
from common.images import choose_decoder
from launch.exits import exit_status

TRAIN, VAL, BATCH = 384, 256, 64
DECODERS = ("torchcodec", "nvimgcodec", "pil")
USUAL = "usual: Pillow, v1 transforms, float"
NORMALISED = "--decoder nvimgcodec, normalised on the CPU"
CPU = torch.device("cpu")


def arguments(folder: Path, decoder: str) -> Namespace:
    """The flags that common.data reads."""
    return Namespace(
        data=str(folder),
        synthetic=None,
        decoder=decoder,
        image_size=224,
        min_crop=0.08,
        no_flip=False,
        no_channels_last=False,
        pretrained=False,
        evaluate=False,
        max_steps=None,
        seed=0,
        global_batch_size=BATCH,
    )


def speed(dataset: Dataset, images: int) -> Callable[[], float]:
    """Return a function that measures the speed of reading single images in order."""

    def measure() -> float:
        began = time.perf_counter()
        for index in range(images):
            dataset[index]
        return images / (time.perf_counter() - began)

    return measure


class Training(SeededDataset):
    """A dataset that starts a new epoch at each image 0, as training does."""

    epoch = 0

    def __getitem__(self, index: int) -> tuple:
        self.epoch += index == 0
        return super().__getitem__((self.epoch, index))


class Normalised(Dataset):
    """A dataset that normalizes images in float32, as conventional pipelines do."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset
        self.mean, self.std = (torch.tensor(x).view(3, 1, 1) for x in (MEAN, STD))

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.dataset[index][0].float().sub_(self.mean).div_(self.std)


def one_core(folder: Path, rounds: int) -> dict[str, dict]:
    """Measure how fast this process reads single images."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    torch.set_num_threads(1)
    train_set = usual.folder(folder / "train", usual.TRAIN)
    val_set = usual.folder(folder / "val", usual.VAL)
    training = {USUAL: speed(train_set, TRAIN)}
    validation = {USUAL: speed(val_set, VAL)}
    # These two rows and the conventional ones normalize on the CPU; the others do not
    train_set, val_set = build_datasets(arguments(folder, "nvimgcodec"))
    training[NORMALISED] = speed(Normalised(Training(train_set, 0)), TRAIN)
    validation[NORMALISED] = speed(Normalised(val_set), VAL)
    for name in DECODERS:
        train_set, val_set = build_datasets(arguments(folder, name))
        training[f"--decoder {name}"] = speed(Training(train_set, 0), TRAIN)
        validation[f"--decoder {name}"] = speed(val_set, VAL)
    results = {}
    for title, works in (("training", training), ("validation", validation)):
        results[title] = compared(interleave(works, rounds), USUAL)
        print_rows(f"{title}, one core", "images/s", results[title])
    os.sched_setaffinity(0, cores)
    return results


def all_cores(folder: Path, rounds: int) -> dict[str, dict]:
    """Measure batches from one loader process per core; this process only gets them."""
    cores = len(os.sched_getaffinity(0))
    indices = [*range(TRAIN)] * 3

    def epoch_of(loader: Iterable) -> Callable[[], float]:
        def measure() -> float:
            began = time.perf_counter()
            images = sum(len(labels) for _, labels in loader)
            return images / (time.perf_counter() - began)

        return measure

    def own_loader(decoder: str) -> DeviceLoader:
        args = arguments(folder, decoder)
        data, share = build_datasets(args)[0], (BATCH, cores, CPU)
        return build_loader(args, data, indices, *share, training=True)

    data = usual.folder(folder / "train", usual.TRAIN)
    options = {"num_workers": cores, "persistent_workers": True}
    candidates = {USUAL: epoch_of(DataLoader(data, BATCH, sampler=indices, **options))}
    candidates[NORMALISED] = epoch_of(own_loader("nvimgcodec"))
    for name in DECODERS:
        loader = own_loader(name)
        loader.normalise = lambda images: images  # left to the device
        candidates[f"--decoder {name}"] = epoch_of(loader)
    rows = compared(interleave(candidates, rounds), USUAL)
    print_rows(f"training, {cores} loader processes on {cores} cores", "images/s", rows)
    return {"loader": rows}


def main() -> None:
    """Run all measurements."""
    choose_decoder("nvimgcodec")  # fail early if it is missing
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    with tempfile.TemporaryDirectory() as folder:
        images = write_photographs(Path(folder), TRAIN, VAL)
        print(f"{images}, {rounds} rounds")
        results = one_core(Path(folder), rounds) | all_cores(Path(folder), rounds)
    write_results("input", {"rounds": rounds, "photographs": [images], **results})


if __name__ == "__main__":
    with exit_status():
        main()
