"""A GPT as Megatron-LM has it: the projections of one head lie together, so that tensor ranks cut them by heads."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and MLP, each behind a norm and next to a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm_2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        """Of (batch, tokens, width) to the same."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, tokens, self.heads, 3, -1).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Megatron(nn.Module):
    """Token and position tables, blocks, norm, and a head that is the token table."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, positions: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        """Of (batch, tokens) to logits."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(logits):
    """Cross entropy; the targets do not matter for time and memory."""
    return F.cross_entropy(logits.flatten(0, 1), torch.zeros(logits.shape[:2].numel(), dtype=torch.int64))


def gpt3_1_3b(batch: int = 8, seq: int = 2048):
    """The dimensions of GPT-3 1.3B; the vocabulary is a multiple of 8 ranks."""
    return Megatron(24, 2048, 16, 51200, 2048), torch.zeros(batch, seq, dtype=torch.int64), loss


def deep(batch: int = 8, seq: int = 512):
    """Twelve narrow blocks."""
    return Megatron(12, 512, 8, 4096, 512), torch.zeros(batch, seq, dtype=torch.int64), loss
