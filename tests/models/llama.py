"""Decoders with grouped-query attention, RMSNorm, SwiGLU and rotary positions, as Llama (arXiv 2307.09288)."""

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32, written out."""

    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return y.to(x.dtype) * self.weight


def rotate(x, cos, sin):
    """Rotary embedding: pairs are halves of a head."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Block(nn.Module):
    """Attention and gated MLP."""

    def __init__(self, width, heads, kv_heads, hidden):
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.head, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.head, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, width, bias=False)
        self.input_norm, self.post_norm = RMSNorm(width), RMSNorm(width)

    def attention(self, x, cos, sin):
        b, t, c = x.shape
        q = self.q_proj(x).view(b, t, self.heads, self.head).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.kv_heads, self.head).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.head).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, c))

    def forward(self, x, cos, sin):
        x = x + self.attention(self.input_norm(x), cos, sin)
        y = self.post_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Llama(nn.Module):
    """Table, blocks, norm, head."""

    def __init__(self, layers, width, heads, kv_heads, hidden, vocabulary, theta=10000.0):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm, self.lm_head = RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        head = width // heads
        self.register_buffer("inverse", theta ** (-torch.arange(0, head, 2).float() / head), persistent=False)

    def forward(self, tokens, targets=None):
        x = self.embed_tokens(tokens)
        angles = torch.outer(torch.arange(tokens.size(1), device=x.device).float(), self.inverse)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.lm_head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def llama(
    layers=2, width=64, heads=4, kv_heads=2, hidden=176, vocabulary=512, tokens=32, batch=2, targets=False
):  # fmt: skip
    """A decoder of that size (Llama 2 7B: 32, 4096, 32, 32, 11008, 32000); with ``targets`` its output is the loss."""
    module = Llama(layers, width, heads, kv_heads, hidden, vocabulary)
    data = torch.randint(0, vocabulary, (batch, tokens + 1))
    return module, (data[:, :-1], data[:, 1:]) if targets else (data[:, :-1],)
