"""Experts with a static capacity: tokens are sorted into one slot table and all experts run as one batched product."""

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional


class Experts(nn.Module):
    """Top-k routing; tokens beyond the capacity of an expert are dropped."""

    def __init__(self, width, hidden, experts, choices, capacity_factor):
        super().__init__()
        self.experts, self.choices, self.factor = experts, choices, capacity_factor
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)

    def forward(self, x):
        tokens, width = x.shape
        capacity = int(tokens * self.choices * self.factor / self.experts)
        weights, chosen = F.softmax(self.router(x), dim=-1).topk(self.choices, dim=-1)
        flat = chosen.flatten()
        hot = F.one_hot(flat, self.experts)
        place = ((hot.cumsum(0) - 1) * hot).sum(-1)
        fits = place < capacity
        slot = torch.where(fits, flat * capacity + place, self.experts * capacity)
        rows = torch.arange(tokens, device=x.device).repeat_interleave(self.choices)
        table = x.new_zeros(self.experts * capacity + 1, width).index_copy(0, slot, x[rows])
        y = table[:-1].view(self.experts, capacity, width)
        y = torch.bmm(F.gelu(torch.bmm(y, self.up)), self.down).flatten(0, 1)
        back = torch.cat([y, y.new_zeros(1, width)])[slot] * (weights.flatten() * fits).unsqueeze(-1)
        return x.new_zeros(tokens, width).index_add(0, rows, back)


class MoE(nn.Module):
    """Blocks of attention and experts."""

    def __init__(self, layers, width, heads, experts, choices, vocabulary, factor):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.attention = nn.ModuleList(nn.MultiheadAttention(width, heads, batch_first=True) for _ in range(layers))
        self.experts = nn.ModuleList(Experts(width, 4 * width, experts, choices, factor) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.table(tokens)
        for i, (attention, experts) in enumerate(zip(self.attention, self.experts, strict=True)):
            y = self.norms[2 * i](x)
            x = x + attention(y, y, y, need_weights=False)[0]
            x = x + experts(self.norms[2 * i + 1](x).flatten(0, 1)).view_as(x)
        return self.head(self.norms[-1](x))


def moe(layers=2, width=32, heads=4, experts=4, choices=2, vocabulary=256, tokens=32, batch=2, factor=1.25):
    """A small mixture of experts."""
    module = MoE(layers, width, heads, experts, choices, vocabulary, factor)
    return module, (torch.randint(0, vocabulary, (batch, tokens)),)
