"""Decoders with learned positions and tied head, as GPT-2; attention fused or written out."""

import math

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width, heads, fused, dropout):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.qkv(x).split(c, dim=2))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            mask = torch.tril(torch.ones(t, t, dtype=torch.bool, device=x.device))
            y = self.drop(F.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1)) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, width, heads, fused, dropout):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width, heads, fused, dropout)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    """Token and position tables, blocks, norm, and a head that is the token table."""

    def __init__(self, layers, width, heads, vocabulary, positions, fused=True, dropout=0.0):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.h = nn.ModuleList(Block(width, heads, fused, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens, targets=None):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt(layers=2, width=64, heads=4, vocabulary=512, tokens=32, batch=2, fused=True, dropout=0.0, targets=False):
    """A small GPT; with ``targets`` its output is the loss."""
    module = GPT(layers, width, heads, vocabulary, tokens, fused, dropout)
    data = torch.randint(0, vocabulary, (batch, tokens + 1))
    return module, (data[:, :-1], data[:, 1:]) if targets else (data[:, :-1],)


def gpt_eager(**sizes):
    """The same with attention written out, and dropout."""
    return gpt(**{"fused": False, "dropout": 0.1, **sizes})


def gpt2_small(batch=1, tokens=1024):
    """GPT-2 small: 124,439,808 parameters."""
    return GPT(12, 768, 12, 50257, 1024), (torch.randint(0, 50257, (batch, tokens)),)
