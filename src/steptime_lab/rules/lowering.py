"""Lowering of terms to nodes of a graph: ATen operators that compute them on typed values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Final

from steptime.captured.graph import Attribute as AtenAttribute
from steptime.captured.graph import Nodes, TensorType, Value
from steptime.captured.graph.program import SOURCES
from steptime.captured.graph.strides import broadcast, is_dense
from steptime.captured.ops import VIEWS, making
from steptime.rewrite.scene import Scene
from steptime_lab.rules.domains import FUNCTIONS
from steptime_lab.rules.sizes import Size
from steptime_lab.rules.terms import Term

Lower = Callable[[Nodes, Sequence[Value], tuple[int, ...]], Value]


def _matmul(nodes: Nodes, given: Sequence[Value], _: tuple[int, ...]) -> Value:
    a, b = given
    left, right = a.type.shape, b.type.shape
    if len(left) == len(right) == 2:
        return making.mm(nodes, a, b)
    lead = broadcast(left[:-2], right[:-2])
    m, k, n = left[-2], left[-1], right[-1]
    if len(right) == 2:
        flat = making.mm(nodes, making.reshape(nodes, a, (prod(left[:-1]), k)), b)
        return making.reshape(nodes, flat, (*lead, m, n))
    batch = prod(lead)
    a = making.reshape(nodes, making.expand(nodes, a, (*lead, m, k)), (batch, m, k))
    b = making.reshape(nodes, making.expand(nodes, b, (*lead, k, n)), (batch, k, n))
    return making.reshape(nodes, making.bmm(nodes, a, b), (*lead, m, n))


def _conv(nodes: Nodes, given: Sequence[Value], attributes: tuple[int, ...]) -> Value:
    stride, pad, dilation, groups = attributes
    x, w, *bias = given
    added = bias[0] if bias else None
    return making.convolution(nodes, x, w, added, stride=(stride,), padding=(pad,), dilation=(dilation,), groups=groups)


def _pool(op: str) -> Lower:
    def lower(nodes: Nodes, given: Sequence[Value], attributes: tuple[int, ...]) -> Value:
        kernel, stride, pad = ((each, each) for each in attributes)
        return making.unary(nodes, op, given[0], kernel_size=kernel, stride=stride, padding=pad, ceil_mode=False)

    return lower


def padded(nodes: Nodes, x: Value, pads: Sequence[int]) -> Value:
    """Pad with zeros: before and after the last dim, then the dim before it, and so on."""
    shape = list(x.type.shape)
    for at in range(len(pads) // 2):
        shape[-1 - at] += pads[2 * at] + pads[2 * at + 1]
    given: dict[str, AtenAttribute] = {"pad": tuple(pads), "value": 0}
    output = TensorType(tuple(shape), x.type.dtype)
    return nodes.apply("constant_pad_nd", {"self": x}, given, outputs=[output]).value()


def _transpose(nodes: Nodes, given: Sequence[Value], attributes: tuple[int, ...]) -> Value:
    (x,) = given
    return making.t(nodes, x) if x.type.rank == 2 else making.transpose(nodes, x, *attributes)


def _expand(nodes: Nodes, given: Sequence[Value], attributes: tuple[int, ...]) -> Value:
    axis, extent = attributes
    shape = list(given[0].type.shape)
    shape[axis] = extent
    return making.expand(nodes, given[0], shape)


def _binary(op: str) -> Lower:
    return lambda nodes, given, _: making.binary(nodes, op, given[0], given[1])


def _unary(op: str) -> Lower:
    return lambda nodes, given, _: making.unary(nodes, op, given[0])


def _reduction(op: str) -> Lower:
    return lambda nodes, given, a: making.reduce(nodes, op, given[0], a, True)


LOWERINGS: Final[Mapping[str, Lower]] = {
    **{op: _binary(op) for op in ("add", "sub", "mul", "maximum")},
    **{op: _unary(row[0].removeprefix("aten.")) for op, row in FUNCTIONS.items()},
    "matmul": _matmul,
    "scale": lambda nodes, given, a: making.mul(nodes, given[0], a[0]),
    "conv": _conv,
    "avgpool": _pool("avg_pool2d"),
    "maxpool": _pool("max_pool2d_with_indices"),
    "concat": lambda nodes, given, a: making.cat(nodes, given, a[0]),
    "slice": lambda nodes, given, a: making.slice(nodes, given[0], *a),
    "pad": lambda nodes, given, a: padded(nodes, given[0], (*(0, 0) * (-1 - a[0]), *a[1:])),
    "enlarge": lambda nodes, given, a: padded(nodes, given[0], a * 4),
    "transpose": _transpose,
    "permute": lambda nodes, given, a: making.permute(nodes, given[0], a),
    "reshape": lambda nodes, given, a: making.reshape(nodes, given[0], a),
    "expand": _expand,
    "sum": _reduction("sum"),
    "mean": _reduction("mean"),
    "max": _reduction("amax"),
    "softmax": lambda nodes, given, a: making.softmax(nodes, given[0], a[0]),
}
"""Operator -> function that makes the ATen nodes which compute it on typed values."""


class Lowering:
    """Builder of nodes for terms over given values; terms of weights alone become constants.

    Args:
        scene: the graph in which nodes are made.
        values: values of terms, including variables.
        sizes: numbers for names of sizes.
        steady: predicate of terms in ``values`` that are the same in every run; None: their values are weights.
        copies: convolutions first copy a tensor with gaps, as PyTorch does.
    """

    def __init__(
        self,
        scene: Scene,
        values: Mapping[Term, Value],
        sizes: Mapping[str, int] | None = None,
        *,
        steady: Callable[[Term], bool] | None = None,
        copies: bool = False,
    ) -> None:
        self._scene, self._nodes, self._values, self._sizes = scene, scene.nodes, values, sizes or {}
        self._steady = steady or (lambda given: scene.is_weight(values[given]))
        self._copies = copies
        self._made: dict[Term, tuple[Value, bool]] = {}

    def value(self, given: Term) -> Value:
        """The value of a term; a constant if it is made of weights alone."""
        return self._folded(*self._of(given))

    def _of(self, given: Term) -> tuple[Value, bool]:
        """The value of a term, and True if it is the same in every run."""
        if given in self._values:
            return self._values[given], self._steady(given)
        if given not in self._made:
            self._made[given] = self._row(given)
        return self._made[given]

    def _row(self, given: Term) -> tuple[Value, bool]:
        bias = self._values.get(given.children[-1]) if given.op == "add" else None
        if bias is not None and bias.type.rank == 1 and given.children[-1].name.startswith("b"):
            inner = given.children[0]
            if inner.op == "conv":
                return self._computed(inner, (*inner.children, given.children[1]))
            bias = making.reshape(self._nodes, bias, (bias.type.elements, 1, 1))  # a column for each channel
            return lowered(self._nodes, "add", (), (self.value(inner), bias)), False
        if given.op == "pad":
            return self._padded(given)
        return self._computed(given, given.children)

    def _computed(self, given: Term, children: Sequence[Term]) -> tuple[Value, bool]:
        parts = [self._of(child) for child in children]
        steady = all(each for _, each in parts)
        inputs = [value if steady else self._folded(value, each) for value, each in parts]
        if given.op == "conv" and self._copies:
            inputs[:2] = [each if is_dense(each.type) else making.clone(self._nodes, each) for each in inputs[:2]]
        return lowered(self._nodes, given.op, self._numbers(given), inputs), steady

    def _numbers(self, given: Term) -> tuple[int | float, ...]:
        return tuple(_number(each, self._sizes) for each in given.attributes)

    def _folded(self, value: Value, steady: bool) -> Value:
        source = value.node
        while source.op in VIEWS and source.inputs:
            source = source.inputs[0].node
        return self._scene.constant(value) if steady and source.op not in SOURCES else value

    def _padded(self, given: Term) -> tuple[Value, bool]:
        """Nested ``pad`` terms as one node."""
        around: dict[int, tuple[int, int]] = {}
        while given.op == "pad" and given not in self._values:
            axis, before, after = map(int, self._numbers(given))
            low, high = around.get(axis, (0, 0))
            around[axis] = (low + before, high + after)
            given = given.children[0]
        pads = [each for axis in range(-1, min(around) - 1, -1) for each in around.get(axis, (0, 0))]
        value, steady = self._of(given)
        return padded(self._nodes, value, pads), steady


def _number(given: Size, at: Mapping[str, int]) -> int | float:
    """An attribute as a number; factors may be fractions."""
    if len(given.terms) == 1 and given.terms[0] == ((), given.terms[0][1]):
        value = given.terms[0][1]
        return int(value) if value == int(value) else float(value)
    return given.value(dict(at))


def lowered(nodes: Nodes, op: str, attributes: tuple[int | float, ...], given: Sequence[Value]) -> Value:
    """An operator on typed values as ATen nodes; a convolution also accepts a bias."""
    return LOWERINGS[op](nodes, given, attributes)  # type: ignore[arg-type]
