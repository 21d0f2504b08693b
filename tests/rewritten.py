"""Small modules for the tests of rewrites, and what they are held against."""

import pytest

torch = pytest.importorskip("torch")

from torch.utils import _pytree  # noqa: E402

from steptime.hardware import device_within  # noqa: E402
from steptime.rewrite.checking import check  # noqa: E402
from steptime.rewrite.engine import apply_passes  # noqa: E402
from steptime.rewrite.trace import trace  # noqa: E402

torch.set_num_threads(1)
nn, F = torch.nn, torch.nn.functional
H100 = device_within("h100-sxm")


class Of(nn.Module):
    """A function as a module, with weights by name."""

    def __init__(self, function, **weights):
        super().__init__()
        self.function = function
        for name, weight in weights.items():
            if isinstance(weight, nn.Module):
                setattr(self, name, weight)
            else:
                setattr(self, name, nn.Parameter(weight))

    def forward(self, *args):
        return self.function(self, *args)


def traced(function, *inputs, target="cpu", training=False, options=None, **weights):
    module = Of(function, **weights)
    module.train(training)
    return trace(module, inputs, target=target, training=training, **(options or {}))


def rewritten(function, *inputs, passes=(), everything=False, device=H100, objective="time", **weights):
    """A module rewritten with some passes, and checked; the result and the names of what was applied."""
    found = apply_passes(
        traced(function, *inputs, **weights).flow, device, passes=passes, everything=everything, objective=objective
    )
    assert check(found.before, found.after).passed
    return found, {step.name for step in found.steps if step.applied}


def ops(flow):
    """Names of the operators that do something."""
    from steptime.captured.graph.program import SOURCES
    from steptime.captured.ops import VIEWS

    return [node.op for node in flow.order if node.op not in VIEWS and node.op not in SOURCES]


def leaves(tree):
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def run(module, inputs):
    with torch.no_grad():
        return leaves(module(**inputs) if isinstance(inputs, dict) else module(*inputs))
