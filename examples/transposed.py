"""A layer of BERT whose transposes are copies, as in the example of TASO; without softmax; behind a convolution."""

import math

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Heads by transposed copies; the scores go through a softmax or not."""

    def __init__(self, width: int, heads: int, softmax: bool) -> None:
        super().__init__()
        self.heads, self.softmax = heads, softmax
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nn.Parameter(torch.randn(width, width) / math.sqrt(width)))

    def forward(self, x):
        """Of (tokens, width) to the same."""
        tokens, width = x.shape
        memory = x.contiguous()
        pairs = ((x, self.query), (memory, self.key), (memory, self.value))
        q, k, v = ((read @ weight).view(tokens, self.heads, -1) for read, weight in pairs)
        q, v = (each.transpose(0, 1).contiguous() for each in (q, v))
        scores = torch.bmm(q, k.permute(1, 2, 0).contiguous())
        if self.softmax:
            scores = torch.softmax(scores / math.sqrt(width // self.heads), -1)
        return torch.bmm(scores, v).transpose(0, 1).contiguous().view(tokens, width) @ self.out


class Layer(nn.Module):
    """Attention and MLP, each followed by a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads, softmax=True)
        self.norm, self.final = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        """Of (tokens, width) to the same."""
        x = self.norm(x + self.attention(x))
        return self.final(x + self.down(F.gelu(self.up(x))))


class Patches(nn.Module):
    """A layer whose tokens are the pixels that a convolution gives: columns of its result."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.layer = Layer(width, heads)

    def forward(self, x):
        """Of (width, pixels) to (pixels, width)."""
        return self.layer(x.t())


def taso(seq: int = 64):
    """Attention of TASO's BERT: width 1024, 16 heads, no softmax."""
    return Attention(1024, 16, softmax=False), torch.zeros(seq, 1024)


def bert(seq: int = 64):
    """A layer of BERT large."""
    return Layer(1024, 16), torch.zeros(seq, 1024)


def patches(seq: int = 64):
    """The layer behind a convolution."""
    return Patches(1024, 16), torch.zeros(1024, seq)
