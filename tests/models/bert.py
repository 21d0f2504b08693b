"""Encoders with norms after the residuals, segments and a pooler, as BERT (arXiv 1810.04805)."""

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional


class Layer(nn.Module):
    """Self-attention over all tokens and an MLP, each followed by a norm."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.norm = nn.Linear(width, width), nn.LayerNorm(width, eps=1e-12)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.final, self.drop = nn.LayerNorm(width, eps=1e-12), nn.Dropout(0.1)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (f(x).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c)
        x = self.norm(x + self.drop(self.out(y)))
        return self.final(x + self.drop(self.down(F.gelu(self.up(x)))))


class Bert(nn.Module):
    """Three tables, layers, and the pooler over the first token."""

    def __init__(self, layers, width, heads, vocabulary, positions):
        super().__init__()
        self.word, self.position = nn.Embedding(vocabulary, width, padding_idx=0), nn.Embedding(positions, width)
        self.segment, self.norm = nn.Embedding(2, width), nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.pooler, self.drop = nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, tokens, segments):
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.drop(self.norm(self.word(tokens) + self.position(positions) + self.segment(segments)))
        for layer in self.layers:
            x = layer(x)
        return x, torch.tanh(self.pooler(x[:, 0]))


def bert(layers=2, width=64, heads=4, vocabulary=512, tokens=32, batch=2):
    """A small encoder."""
    data = torch.randint(0, vocabulary, (batch, tokens))
    return Bert(layers, width, heads, vocabulary, tokens), (data, torch.zeros_like(data))


def bert_base(batch=1, tokens=512):
    """BERT base, uncased, with pooler: 109,482,240 parameters."""
    data = torch.randint(0, 30522, (batch, tokens))
    return Bert(12, 768, 12, 30522, 512), (data, torch.zeros_like(data))
