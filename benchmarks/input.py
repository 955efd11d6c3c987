"""Compare the speed of our input pipeline with that of a conventional pipeline.

    python -m benchmarks.input [ROUNDS]

The benchmark generates JPEG files. On one core, it reads single images for training and
for validation, and measures what share of the time decoding takes. It prints median
ratios with quartiles, and writes benchmarks/results/input.json.
"""

import os
import tempfile
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import Dataset
from torchvision import datasets, transforms

from benchmarks.comparison import compare, parse_number, pin_core, speed, write_results
from benchmarks.photographs import write_photographs
from common.arguments import build_parser
from common.data import MEAN, STD, SeededDataset, build_datasets
from common.errors import one_line_errors
from common.images import DECODERS, decode
from common.nvimgcodec import decode_part

TRAIN, VAL = 384, 256
USUAL = "conventional: Pillow, v1 transforms, float"
NORMALIZED = "--decoder nvimgcodec, normalized on the CPU"
# The conventional pipeline: Pillow and torchvision's v1 transforms
NORMALIZE = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
USUAL_TRAIN = transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()
USUAL_VAL = transforms.Resize(256), transforms.CenterCrop(224)


def usual_folder(root: Path, steps: tuple) -> datasets.ImageFolder:
    """Return a dataset of normalized (3, 224, 224) float32 images."""
    chain = transforms.Compose([*steps, transforms.ToTensor(), NORMALIZE])
    return datasets.ImageFolder(str(root), chain)


def arguments(folder: Path, *flags: object) -> Namespace:
    """Parse the scripts' `flags`; all other flags keep their defaults."""
    return build_parser("").parse_args(["--data", str(folder), *map(str, flags)])


def reading(dataset: Dataset, images: int) -> Callable[[], float]:
    """Return a function that measures the speed of reading single images in order."""
    return speed(dataset.__getitem__, range(images))


class Training(SeededDataset):
    """A dataset that starts a new epoch whenever image 0 is read."""

    epoch = 0

    def __getitem__(self, index: int) -> tuple:
        self.epoch += index == 0
        image, label = super().__getitem__((0, self.epoch, index, index))
        return image.permute(2, 0, 1), label


class Normalized(Dataset):
    """A dataset that normalizes images on the CPU, as conventional pipelines do."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset
        self.mean, self.std = (torch.tensor(x).view(3, 1, 1) for x in (MEAN, STD))

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.dataset[index][0].float().sub_(self.mean).div_(self.std)


def one_core(folder: Path, rounds: int) -> dict[str, dict | list]:
    """Measure how fast this process reads, and how fast it decodes, single images."""
    cores = pin_core()
    training = {USUAL: reading(usual_folder(folder / "train", USUAL_TRAIN), TRAIN)}
    validation = {USUAL: reading(usual_folder(folder / "val", USUAL_VAL), VAL)}
    # The conventional pipelines and these two normalize on the CPU; the others do not
    train_set, val_set = build_datasets(arguments(folder, "--decoder", "nvimgcodec"))
    training[NORMALIZED] = reading(Normalized(Training(train_set)), TRAIN)
    validation[NORMALIZED] = reading(Normalized(val_set), VAL)
    files = [path.read_bytes() for path in sorted(folder.glob("train/*/*"))]
    decoding = {}
    for name in DECODERS:
        train_set, val_set = build_datasets(arguments(folder, "--decoder", name))
        training[f"--decoder {name}"] = reading(Training(train_set), TRAIN)
        validation[f"--decoder {name}"] = reading(val_set, VAL)
        decoding[name] = speed(partial(decode, decoder=name), files)
    decoding["nvimgcodec"] = speed(partial(decode_part, crop=USUAL_TRAIN[0]), files)
    works = {"validation": validation, "training": training | decoding}
    rows = {name: compare(f"{name}, one core", works[name], rounds) for name in works}
    os.sched_setaffinity(0, cores)
    rows["parts"] = []
    for name in DECODERS:
        alone = 1000 / rows["training"].pop(name)["value"]["median"]
        whole = 1000 / rows["training"][f"--decoder {name}"]["value"]["median"]
        row = {"--decoder": name, "ms_per_image": whole, "decoding": alone}
        rows["parts"].append(row | {"crop,_resize,_flip": whole - alone})
    return rows


def main() -> None:
    """Run all measurements."""
    rounds = parse_number(__doc__, "ROUNDS", 9)
    with tempfile.TemporaryDirectory() as folder:
        images = write_photographs(Path(folder), TRAIN, VAL)
        print(f"{images}, {rounds} rounds")
        results = one_core(Path(folder), rounds)
    write_results("input", {"rounds": rounds, "photographs": [images], **results})


if __name__ == "__main__":
    with one_line_errors():
        main()
