"""Models whose shardings are run, each with its inputs and its loss."""

import torch
from torch import nn
from torch.nn import functional as F

from models.gpt import gpt as small_gpt
from models.moe import moe as small_moe


def labels(logits):
    """Cross entropy against classes that follow from the place."""
    rows = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(rows, torch.arange(rows.shape[0]) % rows.shape[1])


def gpt():
    """Three blocks, a head that is the token table."""
    return (*small_gpt(layers=3, width=32, vocabulary=64, tokens=16, batch=8), labels)


def odd_gpt():
    """A vocabulary that no axis divides."""
    return (*small_gpt(layers=2, width=32, vocabulary=67, tokens=16, batch=8), labels)


def deep_gpt():
    """Six blocks, four of which have the same shardings; its capture is folded."""
    return (*small_gpt(layers=6, width=32, vocabulary=64, tokens=16, batch=8), labels)


def moe():
    """Two blocks of four experts, two for each token."""
    return (*small_moe(vocabulary=64, tokens=16, batch=8), labels)


class Convolutions(nn.Module):
    """Convolutions with batch norm and a residual, then a group norm, pooling and a classifier.

    A view is read after what it looks at was changed in place.
    """

    def __init__(self, width=16):
        super().__init__()
        self.stem, self.norm_1 = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.inner, self.norm_2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.wide, self.norm_3 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.GroupNorm(8, 2 * width)
        self.head = nn.Linear(2 * width, 8)

    def forward(self, x):
        x = F.relu(self.norm_1(self.stem(x)))
        x = x + F.relu(self.norm_2(self.inner(x)), inplace=True)
        x = self.norm_3(self.wide(x))
        seen = x.flatten(2)
        x.relu_()
        return self.head(seen.mean(2))


def convolutions():
    """Eight images."""
    return Convolutions(), (torch.randn(8, 3, 16, 16),), labels
