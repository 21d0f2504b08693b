"""Derivatives of graphs: reverse mode with PyTorch's own backward operators, and forward mode."""

from steptime.captured.autodiff.backwards import Gradients, gradients
from steptime.captured.autodiff.forwards import jvp, pushforward
from steptime.captured.autodiff.table import Step, elementwise, forward, reverse, root, storages

__all__ = [
    "Gradients",
    "Step",
    "elementwise",
    "forward",
    "gradients",
    "jvp",
    "pushforward",
    "reverse",
    "root",
    "storages",
]
