"""Images per second of the input pipeline against the usual one.

    python -m benchmarks.input [ROUNDS]

On one core: single images, training and validation, and decoding alone, the limit for
that decoder. On all cores: a DataLoader with one process per core. Makes its own
JPEG files; prints median ratios with their quartiles and writes results/input.json.
"""

import os
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
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
    share_out,
)
from common.errors import exit_status
from common.images import DECODERS, choose_decoder, random_box

TRAIN, VAL, BATCH = 384, 256, 64
USUAL = "usual: Pillow, v1 transforms, float"
NORMALISED = "--decoder nvimgcodec, normalised on the CPU"
PART = "nvimgcodec, cropped part"
CPU = torch.device("cpu")


def arguments(folder: Path, decoder: str, workers: int = 0) -> Namespace:
    """What the scripts hand to common.data."""
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
        workers=workers,
    )


def speed(work: Callable[[int], object], images: int) -> Callable[[], float]:
    """Measures images per second of work(0), work(1), ..."""

    def measure() -> float:
        began = time.perf_counter()
        for index in range(images):
            work(index)
        return images / (time.perf_counter() - began)

    return measure


def epochs(dataset: Dataset) -> Callable[[int], object]:
    """Reads from a new epoch whenever it comes to image 0, as training does."""
    seeded = SeededDataset(dataset, seed=0)
    epoch = 0

    def read(index: int) -> object:
        nonlocal epoch
        epoch += index == 0
        return seeded[epoch, index]

    return read


def whole(open_picture: Callable, paths: Sequence[str]) -> Callable[[int], object]:
    """Decodes whole files."""

    def read(index: int) -> object:
        picture = open_picture(paths[index])
        return picture.read(0, 0, picture.height, picture.width)

    return read


def parts(open_picture: Callable, paths: Sequence[str]) -> Callable[[int], object]:
    """Draws and decodes the parts that training takes."""

    def read(index: int) -> object:
        picture = open_picture(paths[index])
        return picture.read(*random_box(picture.height, picture.width, 0.08))

    return read


def normalised(read: Callable[[int], tuple]) -> Callable[[int], object]:
    """Makes normalised float32 of it at once, as the usual pipeline does."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return lambda index: read(index)[0].float().sub_(mean).div_(std)


def one_core(folder: Path, rounds: int) -> dict[str, dict]:
    """Single images in this process."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    torch.set_num_threads(1)
    train, val = usual.train_set(folder / "train"), usual.val_set(folder / "val")
    training = {USUAL: speed(train.__getitem__, TRAIN)}
    validation = {USUAL: speed(val.__getitem__, VAL)}
    # What the rows below leave to the device, and the usual pipeline does not
    train_set, val_set = build_datasets(arguments(folder, "nvimgcodec"))
    training[NORMALISED] = speed(normalised(epochs(train_set)), TRAIN)
    validation[NORMALISED] = speed(normalised(epochs(val_set)), VAL)
    decoding = {}
    for name, open_picture in DECODERS.items():
        train_set, val_set = build_datasets(arguments(folder, name))
        paths = list(train_set.paths)
        training[f"--decoder {name}"] = speed(epochs(train_set), TRAIN)
        validation[f"--decoder {name}"] = speed(val_set.__getitem__, VAL)
        decoding[f"{name}, whole image"] = speed(whole(open_picture, paths), TRAIN)
    decoding[PART] = speed(parts(DECODERS["nvimgcodec"], paths), TRAIN)
    results = {}
    floors = {f"decoding alone: {name}": work for name, work in decoding.items()}
    for title, candidates in (
        ("training", {**training, **floors}),
        ("validation", validation),
    ):
        found = interleave(candidates, rounds)
        rows = compared(found, USUAL)
        print_rows(f"{title}, one core", "images/s", rows)
        results[title] = rows
        if title == "training":
            floor = f"decoding alone: {PART}"
            name = "--decoder nvimgcodec"
            shares = compared({floor: found[floor], name: found[name]}, floor)
            results["share_of_floor"] = shares[name]["ratio"]
    os.sched_setaffinity(0, cores)
    return results


def all_cores(folder: Path, rounds: int) -> dict[str, dict]:
    """Batches from one loader process per core; this process only receives them."""
    cores = len(os.sched_getaffinity(0))
    indices = [*range(TRAIN)] * 3
    usual_loader = DataLoader(
        usual.train_set(folder / "train"),
        BATCH,
        sampler=indices,
        num_workers=cores,
        persistent_workers=True,
    )

    def epoch_of(loader: Iterable) -> Callable[[], float]:
        def measure() -> float:
            began = time.perf_counter()
            images = sum(len(labels) for _, labels in loader)
            return images / (time.perf_counter() - began)

        return measure

    candidates = {USUAL: epoch_of(usual_loader)}
    loader = own_loader(folder, "nvimgcodec", indices, cores)
    candidates[NORMALISED] = epoch_of(loader)
    for name in DECODERS:
        loader = own_loader(folder, name, indices, cores)
        loader.normalise = lambda images: images  # left to the device
        candidates[f"--decoder {name}"] = epoch_of(loader)
    rows = compared(interleave(candidates, rounds), USUAL)
    print_rows(f"training, {cores} loader processes on {cores} cores", "images/s", rows)
    return {"loader": rows}


def own_loader(
    folder: Path, decoder: str, indices: list[int], workers: int
) -> DeviceLoader:
    """The loader of the five scripts."""
    args = arguments(folder, decoder, workers)
    share_out(args, 0, 1, 1)
    train_set, _ = build_datasets(args)
    return build_loader(args, train_set, indices, CPU, training=True)


def main() -> None:
    """Measure everything."""
    choose_decoder("nvimgcodec")  # or say what is missing before it takes minutes
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    with tempfile.TemporaryDirectory() as folder:
        images = write_photographs(Path(folder), TRAIN, VAL)
        print(f"{images}, {rounds} rounds")
        results = one_core(Path(folder), rounds)
        results |= all_cores(Path(folder), rounds)
    write_results("input", {"rounds": rounds, "photographs": [images], **results})


if __name__ == "__main__":
    with exit_status():
        main()
