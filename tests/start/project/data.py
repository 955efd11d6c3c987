"""Read the images that train.csv and val.csv list in the columns `path` and `label`."""

import csv
from argparse import Namespace
from functools import partial
from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset

from common.errors import UserError
from common.images import read_image, train_transform, val_transform


class Pictures(Dataset):
    """A dataset of (3, S, S) uint8 tensors and their labels' positions in `classes`."""

    classes = ["0", "1", "2"]

    def __init__(self, file: Path, decoder: str, transform):
        self.folder, self.decoder, self.transform = file.parent, decoder, transform
        try:
            with open(file, newline="") as lines:
                self.rows = list(csv.DictReader(lines))
        except OSError as error:
            raise UserError(f"--data: {error}") from None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row = self.rows[index]
        path = str(self.folder / row["path"])
        image = read_image(path, self.decoder, self.transform)
        return image, self.classes.index(row["label"])


def build_datasets(args: Namespace) -> tuple[Pictures, Pictures]:
    """Return the training and validation images in args.data."""
    size, flip, folder = args.image_size, not args.no_flip, Path(args.data)
    train = partial(train_transform, size=size, min_crop=args.min_crop, flip=flip)
    return (
        Pictures(folder / "train.csv", args.decoder, train),
        Pictures(folder / "val.csv", args.decoder, partial(val_transform, size=size)),
    )
