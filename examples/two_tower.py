"""Two towers for `steptime shard --pipeline`: encoders of images and of texts that meet in a contrastive loss."""

import torch
from torch import nn
from torch.nn import functional as F


class ImageTower(nn.Module):
    """Convolutions that halve the pixels, and a projection of their mean."""

    def __init__(self, channels: tuple[int, ...], width: int) -> None:
        super().__init__()
        inside, layers = 3, []
        for outside in channels:
            for size, stride in ((inside, 2), (outside, 1)):
                layers += [nn.Conv2d(size, outside, 3, stride, padding=1), nn.ReLU()]
            inside = outside
        self.layers, self.project = nn.Sequential(*layers), nn.Linear(inside, width)

    def forward(self, pixels):
        """Of (batch, 3, height, width) to (batch, width)."""
        return self.project(self.layers(pixels).mean((2, 3)))


class TextTower(nn.Module):
    """A table, MLPs with residuals over each token, and a projection of their mean."""

    def __init__(self, vocabulary: int, hidden: int, layers: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
            for _ in range(layers)
        )
        self.project = nn.Linear(hidden, width)

    def forward(self, tokens):
        """Of (batch, tokens) to (batch, width)."""
        x = self.table(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.project(x.mean(1))


class TwoTower(nn.Module):
    """Similarities of all images and texts of a batch."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.image = ImageTower((64, 128, 256, 512), width)
        self.text = TextTower(30000, 768, 6, width)

    def forward(self, pixels, tokens):
        """Of (batch, 3, height, width) and (batch, tokens) to (batch, batch)."""
        image, text = self.image(pixels), self.text(tokens)
        return F.normalize(image, dim=1) @ F.normalize(text, dim=1).T


def loss(similarities):
    """Each image is of the text with its number (arXiv 2103.00020, one of the two directions)."""
    return F.cross_entropy(similarities, torch.arange(len(similarities), device=similarities.device))


def two_tower(batch: int = 64, pixels: int = 128, tokens: int = 32):
    """Module, inputs, loss."""
    inputs = torch.zeros(batch, 3, pixels, pixels), torch.zeros(batch, tokens, dtype=torch.int64)
    return TwoTower(), inputs, loss
