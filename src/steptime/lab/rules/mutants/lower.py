"""A verified term as nodes of a graph, for numbers in the place of its names."""

from __future__ import annotations

from collections.abc import Mapping

from steptime.captured.graph import Value
from steptime.captured.graph.strides import is_dense
from steptime.captured.ops import making
from steptime.lab.rules.lowering import lowered, padded
from steptime.lab.rules.terms import VARIABLE, Term
from steptime.rewrite.scene import Scene


class Lowering:
    """Makes the nodes of terms over given values; subterms of weights alone are computed before the run."""

    def __init__(self, scene: Scene, values: Mapping[str, Value], sizes: Mapping[str, int]) -> None:
        self._scene, self._nodes, self._values, self._sizes = scene, scene.nodes, values, sizes
        self._made: dict[Term, Value] = {}

    def value(self, given: Term) -> Value:
        """The value of a term."""
        if given.op == VARIABLE:
            return self._values[given.name]
        if given not in self._made:
            made = self._row(given)
            weights = all(self._scene.is_weight(self._values[name]) for name in given.variables())
            self._made[given] = self._scene.constant(made) if weights and given.variables() else made
        return self._made[given]

    def _row(self, given: Term) -> Value:
        if given.op == "add" and given.children[1].name.startswith("b"):
            inner, bias = given.children[0], self._values[given.children[1].name]
            if inner.op == "conv":
                return self._convolution(inner, bias)
            bias = making.reshape(self._nodes, bias, (bias.type.elements, 1, 1))  # a column for each channel
            return lowered(self._nodes, "add", (), (self.value(inner), bias))
        if given.op == "conv":
            return self._convolution(given, None)
        if given.op == "pad":
            return self._padded(given)
        return lowered(self._nodes, given.op, self._numbers(given), [self.value(child) for child in given.children])

    def _numbers(self, given: Term) -> tuple[int, ...]:
        return tuple(each.value(dict(self._sizes)) for each in given.attributes)

    def _convolution(self, given: Term, bias: Value | None) -> Value:
        stride, padding, dilation, groups = self._numbers(given)
        x, w = (self._dense(self.value(child)) for child in given.children)
        return making.convolution(
            self._nodes,
            x,
            w,
            bias,
            stride=(stride,) * 2,
            padding=(padding,) * 2,
            dilation=(dilation,) * 2,
            groups=groups,
        )

    def _dense(self, value: Value) -> Value:
        """A kernel of a convolution takes a tensor without gaps: PyTorch copies any other one first."""
        return value if is_dense(value.type) else making.clone(self._nodes, value)

    def _padded(self, given: Term) -> Value:
        """Zeros around a tensor: terms that pad one after the other are one node."""
        around: dict[int, tuple[int, int]] = {}
        while given.op == "pad":
            axis, before, after = self._numbers(given)
            low, high = around.get(axis, (0, 0))
            around[axis] = (low + before, high + after)
            given = given.children[0]
        pads = [each for axis in range(-1, min(around) - 1, -1) for each in around.get(axis, (0, 0))]
        return padded(self._nodes, self.value(given), pads)
