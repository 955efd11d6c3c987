"""The usual ImageNet input pipeline: what the compared scripts have in common.

Pillow decodes, torchvision's v1 transforms crop, and the loader process makes
normalised float32 tensors of it.
"""

from pathlib import Path

from torchvision import datasets, transforms

NORMALISE = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def train_set(folder: Path) -> datasets.ImageFolder:
    """Training images as (3, 224, 224) float32 tensors."""
    return datasets.ImageFolder(
        str(folder),
        transforms.Compose(
            [
                transforms.RandomResizedCrop(224),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                NORMALISE,
            ]
        ),
    )


def val_set(folder: Path) -> datasets.ImageFolder:
    """Validation images as (3, 224, 224) float32 tensors."""
    return datasets.ImageFolder(
        str(folder),
        transforms.Compose(
            [
                transforms.Resize(256),
                transforms.CenterCrop(224),
                transforms.ToTensor(),
                NORMALISE,
            ]
        ),
    )
