"""A U-Net: down by strided pooling, up by transposed convolutions, skips joined by concatenation."""

import itertools

import pytest

torch = pytest.importorskip("torch")
nn = torch.nn


def twice(inside, outside):
    """Two 3 x 3 convolutions with group norm and SiLU."""
    layers = []
    for width in (inside, outside):
        layers += [nn.Conv2d(width, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.SiLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Levels of twice the width and half the pixels."""

    def __init__(self, width=16, levels=3, inputs=3, classes=2):
        super().__init__()
        widths = [width * 2**i for i in range(levels + 1)]
        self.first = twice(inputs, width)
        self.down = nn.ModuleList(twice(a, b) for a, b in itertools.pairwise(widths))
        self.pool = nn.MaxPool2d(2)
        pairs = list(itertools.pairwise(widths))[::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairs)
        self.join = nn.ModuleList(twice(2 * a, a) for a, _ in pairs)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        kept = [self.first(x)]
        for block in self.down:
            kept.append(block(self.pool(kept[-1])))
        x = kept.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([kept.pop(), up(x)], dim=1))
        return self.head(x)


def unet(batch=2, pixels=32, width=16, levels=3):
    """A small U-Net."""
    return UNet(width, levels), (torch.randn(batch, 3, pixels, pixels),)
