"""Pictures that train.csv and val.csv name, with columns `path` and `label`."""

import csv
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2 import InterpolationMode

from common.errors import UserError
from common.images import TrainTransform, ValTransform, read_image


class Pictures(Dataset):
    """An item is a (3, S, S) uint8 tensor and the label's position in `classes`."""

    def __init__(self, file: Path, decoder: str, transform: Callable):
        self.folder = file.parent
        with open(file, newline="") as lines:
            self.rows = list(csv.DictReader(lines))
        self.classes = ["0", "1", "2"]
        self.decoder = decoder
        self.transform = transform

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row = self.rows[index]
        path = str(self.folder / row["path"])
        image = read_image(path, self.decoder, self.transform)
        return image, self.classes.index(row["label"])


def build_datasets(args: Namespace) -> tuple[Pictures, Pictures]:
    """Training and validation pictures of args.data."""
    if args.synthetic:
        raise UserError("--synthetic: this project has pictures only")
    size, folder = args.image_size, Path(args.data)
    train = TrainTransform(size, args.min_crop, flip=not args.no_flip)
    val = ValTransform(size, size, InterpolationMode.BILINEAR)
    return (
        Pictures(folder / "train.csv", args.decoder, train),
        Pictures(folder / "val.csv", args.decoder, val),
    )
