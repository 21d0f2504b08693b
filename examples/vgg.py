"""VGG-16 as a factory for `steptime plan`: configuration D of arXiv 1409.1556, for a batch of images."""

import torch
from torch import nn

WIDTHS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
"""Channels of each convolution; 0: images of half the size."""


def convolutions() -> nn.Sequential:
    """The part that sees pixels."""
    layers, channels = [], 3
    for width in WIDTHS:
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)] if width else [nn.MaxPool2d(2)]
        channels = width or channels
    return nn.Sequential(*layers)


def dense(size: int, classes: int) -> nn.Sequential:
    """The part that has most of the weights; `size`: pixels of an image on each side."""
    first = nn.Linear(512 * (size // 32) ** 2, 4096)
    rest = [nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    return nn.Sequential(nn.Flatten(), first, *rest, nn.Linear(4096, classes))


class VGG(nn.Module):
    """Convolutions, then dense layers."""

    def __init__(self, size: int = 224, classes: int = 1000) -> None:
        super().__init__()
        self.features, self.classifier = convolutions(), dense(size, classes)

    def forward(self, images):
        """Of (batch, 3, size, size) to (batch, classes)."""
        return self.classifier(self.features(images))


def loss(scores):
    """Cross entropy; the targets do not matter for time and memory."""
    return nn.functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64))


def vgg16(batch: int = 8):
    """Module, inputs and loss."""
    return VGG(), (torch.zeros(batch, 3, 224, 224),), loss
