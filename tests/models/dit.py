"""A diffusion transformer as arXiv 2212.09748 describes it, written for the tests: blocks with modulated norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and MLP whose norms, and what they add, are scaled by six vectors of the conditioning."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.modulation = nn.Linear(hidden, 6 * hidden)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.modulation(functional.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        y = self.norms[0](x) * (1 + parts[0]) + parts[1]
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + parts[2] * self.out(y)
        y = self.norms[1](x) * (1 + parts[3]) + parts[4]
        return x + parts[5] * self.down(functional.gelu(self.up(y)))


class DiT(nn.Module):
    """Patches of a latent image, time step and class in; a prediction per patch out."""

    def __init__(self, layers: int, hidden: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.patches, self.positions = nn.Linear(16, hidden), nn.Parameter(torch.zeros(tokens, hidden))
        self.time = nn.Sequential(nn.Linear(256, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.classes = nn.Embedding(1001, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden, elementwise_affine=False)
        self.modulation, self.last = nn.Linear(hidden, 2 * hidden), nn.Linear(hidden, 32)

    def forward(self, latents: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(latents) + self.positions
        condition = self.time(times) + self.classes(labels)
        for block in self.blocks:
            x = block(x, condition)
        scale, shift = self.modulation(functional.silu(condition)).unsqueeze(1).chunk(2, dim=-1)
        return self.last(self.norm(x) * (1 + scale) + shift)
