"""A transformer block as papers write it: attention, norm and GELU in single operators, and an adapter."""

import math

import torch
from torch import nn


class Norm(nn.Module):
    """Layer norm from means."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        """Over the last dim."""
        centred = x - x.mean(-1, keepdim=True)
        variance = (centred * centred).mean(-1, keepdim=True)
        return centred / torch.sqrt(variance + 1e-5) * self.weight + self.bias


class Adapted(nn.Module):
    """A product with a weight and a narrow adapter next to it."""

    def __init__(self, width: int, out: int, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, out) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(width, rank) / math.sqrt(width))
        self.up = nn.Parameter(torch.randn(rank, out) / math.sqrt(rank))

    def forward(self, x):
        """x W + (x A) B / 2."""
        return x @ self.weight + (x @ self.down) @ self.up * 0.5


class Block(nn.Module):
    """Attention and MLP, each behind a norm and with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = Norm(width), Norm(width)
        self.query, self.key, self.value = (Adapted(width, width, 8) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x):
        """Scores, softmax and sums in single operators."""
        b, t, c = x.shape
        q, k, v = (f(x).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = q @ k.transpose(2, 3) / math.sqrt(c // self.heads)
        return self.out((torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(b, t, c))

    def forward(self, x):
        """Of (batch, tokens, width) to the same."""
        x = x + self.attention(self.norm_1(x))
        h = self.up(self.norm_2(x))
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        return x + self.down(h)


def block(batch: int = 4, seq: int = 256):
    """Two blocks of width 512."""
    return nn.Sequential(Block(512, 8), Block(512, 8)), torch.zeros(batch, seq, 512)
