"""Modules whose shardings tests look at, and their problems on a mesh of two by four."""

from __future__ import annotations

from functools import cache

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from steptime.captured.cost import Timer  # noqa: E402
from steptime.captured.ops.placement import text_of  # noqa: E402
from steptime.captured.record.step import capture  # noqa: E402
from steptime.hardware import load_cluster  # noqa: E402
from steptime.sharding.build import Built, built  # noqa: E402
from steptime.sharding.flow import flow_of  # noqa: E402
from steptime.sharding.mesh import mesh_on  # noqa: E402


class Attention(nn.Module):
    """Queries, keys and values of their own; fused, or as products with a softmax."""

    def __init__(self, width: int = 128, heads: int = 8, fused: bool = True) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (each(x).view(b, t, self.heads, -1).transpose(1, 2) for each in (self.q, self.k, self.v))
        if self.fused:
            y = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[0]
        else:
            y = (q @ k.transpose(2, 3)).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and next to a residual."""

    def __init__(self, width: int = 128, heads: int = 8) -> None:
        super().__init__()
        self.norm_1, self.attention, self.norm_2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Token table, blocks, norm, head."""

    def __init__(self, layers: int = 4, width: int = 128, vocabulary: int = 1000) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(vocabulary, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, targets):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


@cache
def gpt() -> Built:
    """A step of the GPT on data=2, model=4."""
    tokens, targets = (torch.zeros(8, 64, dtype=torch.int64) for _ in range(2))
    return on_mesh(capture(GPT(), [tokens, targets]))


def on_mesh(program, data: int = 2, model: int = 4) -> Built:
    """The problem of a program."""
    cluster = load_cluster("dgx-h100")
    mesh = mesh_on(cluster, {"data": data, "model": model})
    return built(flow_of(program), mesh, Timer(device=cluster.device))


def shardings(problem: Built, choice, name: str) -> tuple[list[str], list[str]]:
    """Inputs and outputs of the first item with a name, as texts."""
    number = next(n for n, item in enumerate(problem.flow.items) if item.name == name)
    way = problem.ways[number][choice[number]]
    return list(map(text_of, way.inputs)), list(map(text_of, way.outputs))
