"""The usual ImageNet input pipeline.

Pillow decodes, torchvision's v1 transforms crop, and the loader process makes
normalised float32 tensors.
"""

from pathlib import Path

from torchvision import datasets, transforms

NORMALISE = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
TRAIN = (transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip())
VAL = (transforms.Resize(256), transforms.CenterCrop(224))


def folder(root: Path, steps: tuple) -> datasets.ImageFolder:
    """Images as (3, 224, 224) float32 tensors; `steps` are TRAIN or VAL."""
    chain = transforms.Compose([*steps, transforms.ToTensor(), NORMALISE])
    return datasets.ImageFolder(str(root), chain)
