"""Read the images that train.csv and val.csv list in the columns `path` and `label`."""

import csv
from argparse import Namespace
from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2

from common.errors import UserError
from common.images import read_image


class Pictures(Dataset):
    """A dataset of (3, S, S) uint8 tensors and their labels' positions in `classes`."""

    classes = ["0", "1", "2"]

    def __init__(self, file: Path, decoder: str, *steps: v2.Transform):
        self.folder, self.decoder = file.parent, decoder
        self.transform = v2.Compose([*steps, v2.PILToTensor()])
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
    size, folder = args.image_size, Path(args.data)
    train = v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()
    val = v2.Resize(size * 256 // 224), v2.CenterCrop(size)
    return (
        Pictures(folder / "train.csv", args.decoder, *train),
        Pictures(folder / "val.csv", args.decoder, *val),
    )
