"""A multilayer perceptron."""

import pytest

torch = pytest.importorskip("torch")
nn = torch.nn


def mlp(width=64, hidden=256, layers=3, classes=10, batch=32):
    """Linear layers with ReLU and dropout between them."""
    widths = [width, *[hidden] * (layers - 1)]
    blocks = [nn.Sequential(nn.Linear(a, hidden), nn.ReLU(), nn.Dropout(0.1)) for a in widths]
    module = nn.Sequential(*blocks, nn.Linear(hidden, classes))
    return module, (torch.randn(batch, width),)
