"""A conventional ImageNet input pipeline.

Pillow decodes the images, torchvision's v1 transforms crop them, and the loader process
converts them to normalized float32 tensors.
"""

from pathlib import Path

from torchvision import datasets, transforms

NORMALIZE = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
TRAIN = (transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip())
VAL = (transforms.Resize(256), transforms.CenterCrop(224))


def folder(root: Path, steps: tuple) -> datasets.ImageFolder:
    """Return a dataset of (3, 224, 224) float32 images; `steps` is TRAIN or VAL."""
    chain = transforms.Compose([*steps, transforms.ToTensor(), NORMALIZE])
    return datasets.ImageFolder(str(root), chain)
