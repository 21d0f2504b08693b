"""A small network as a factory for `steptime fit`."""

import torch
from torch import nn


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        """Of (batch, tokens, 64) to the same."""
        return x + self.mlp(x)


def net(batch=4):
    """Two blocks."""
    return nn.Sequential(Block(), Block()), torch.zeros(batch, 32, 64)
