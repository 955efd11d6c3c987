"""A small convolutional network."""

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """(B, 3, S, S) pictures -> (B, classes); its first weights depend on the seed."""

    def __init__(self, seed: int, classes: int):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=4, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Conv2d(16, 32, 3, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, classes),
        )

    def forward(self, pictures: Tensor) -> Tensor:
        return self.layers(pictures)
