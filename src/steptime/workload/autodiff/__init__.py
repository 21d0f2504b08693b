"""Derivatives of graphs: reverse mode with PyTorch's own backward operators, and forward mode."""

from steptime.workload.autodiff.backwards import Gradients, gradients
from steptime.workload.autodiff.forwards import pushforward
from steptime.workload.autodiff.storage import root, storages
from steptime.workload.autodiff.table import Step, elementwise, forward, reverse

__all__ = ["Gradients", "Step", "elementwise", "forward", "gradients", "pushforward", "reverse", "root", "storages"]
