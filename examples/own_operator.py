"""An operator of one's own for PyTorch, and its row for steptime."""

from __future__ import annotations

import torch

import steptime
from steptime.captured.ops.labels import spelled
from steptime.captured.ops.maps import per_element


@torch.library.custom_op("lab::gated", mutates_args=())
def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Sigmoid of x (rows, width), times a weight (width)."""
    return torch.sigmoid(x) * weight


@gated.register_fake
def _(x, weight):
    return torch.empty_like(x)


gated.register_autograd(lambda context, gradient: (gradient, gradient.sum(0)))

steptime.register_operator(
    steptime.Operator(
        names="lab::gated", family="map", work=per_element(5), dims=spelled("rows width, width -> rows width")
    )
)


class Gated(torch.nn.Module):
    """A layer and its gate."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = torch.nn.Linear(1024, 1024), torch.nn.Parameter(torch.ones(1024))

    def forward(self, x):
        """Sum of the gated results."""
        return gated(self.layer(x), self.scale).sum()


def model(batch=8192):
    """The module and its input."""
    return Gated(), (torch.zeros(batch, 1024),)
