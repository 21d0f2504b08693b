"""VGG-16 (arXiv 1409.1556): thirteen convolutions with five pools, then three dense layers that have most weights."""

import pytest

from models.csrnet import stack

torch = pytest.importorskip("torch")
nn = torch.nn

CHANNELS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
"""Channels; 0 is a pool."""


class Vgg(nn.Module):
    """Convolutions and dense layers."""

    def __init__(self, pixels, divisor=1, classes=1000):
        super().__init__()
        width, flat = 4096 // divisor, 512 // divisor * (pixels // 32) ** 2
        self.features = stack(3, [c // divisor for c in CHANNELS], 1)
        self.classifier = nn.Sequential(
            nn.Linear(flat, width), nn.ReLU(True), nn.Dropout(),
            nn.Linear(width, width), nn.ReLU(True), nn.Dropout(), nn.Linear(width, classes),
        )  # fmt: skip

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def vgg16(batch=1, pixels=224, divisor=1):
    """VGG-16: 138,357,544 parameters; ``divisor`` narrows it."""
    return Vgg(pixels, divisor), (torch.randn(batch, 3, pixels, pixels),)
