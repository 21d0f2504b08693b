"""The operators of rules on numbers: shapes, and the ATen nodes that compute them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Final

from steptime.captured.graph import Attribute as AtenAttribute
from steptime.captured.graph import Nodes, TensorType, Value
from steptime.captured.graph.strides import broadcast
from steptime.captured.ops import making
from steptime.errors import UserError
from steptime.lab.rules.domains import FUNCTIONS
from steptime.lab.rules.operators import OPERATORS
from steptime.lab.rules.sizes import Condition, size

Shape = tuple[int, ...]
Attribute = int | float | str
LEAF: Final = "leaf"
"""What rules do not look into."""
MOVEMENTS: Final = frozenset({"concat", "slice", "pad", "enlarge", "transpose", "permute", "reshape", "expand"})
"""Operators that hold for every element type."""
NO_KERNEL: Final = frozenset({"slice", "transpose", "permute", "reshape", "expand", LEAF})


@lru_cache(maxsize=2**17)
def shape_of(op: str, attributes: tuple[Attribute, ...], shapes: tuple[Shape, ...]) -> Shape | None:
    """Shape of an operator on numbers; None where it does not take them.

    >>> shape_of("matmul", (), ((2, 3), (3, 4))), shape_of("matmul", (), ((2, 3), (4, 4)))
    ((2, 4), None)
    """
    if op == "scale":
        return shapes[0]
    needs: list[Condition] = []
    try:
        given = tuple(size(each) for each in attributes if isinstance(each, int))
        dims = OPERATORS[op].shape(given, [tuple(map(size, each)) for each in shapes], needs)
    except (UserError, IndexError):
        return None
    numbers = tuple(dim.number for dim in dims)
    if not all(each.holds({}) for each in needs):
        return None
    return tuple(each for each in numbers if each is not None)


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
    x, w = given
    return making.convolution(
        nodes, x, w, None, stride=(stride,), padding=(pad,), dilation=(dilation,), output_padding=(0,), groups=groups
    )


def _pool(op: str) -> Lower:
    def lower(nodes: Nodes, given: Sequence[Value], attributes: tuple[int, ...]) -> Value:
        kernel, stride, pad = ((each, each) for each in attributes)
        return making.unary(nodes, op, given[0], kernel_size=kernel, stride=stride, padding=pad, ceil_mode=False)

    return lower


def padded(nodes: Nodes, x: Value, pads: Sequence[int]) -> Value:
    """Zeros around the last dims: before and after the last one, then of the one before it."""
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
"""Operator -> the ATen nodes that compute it on typed values."""


def lowered(nodes: Nodes, op: str, attributes: tuple[Attribute, ...], given: Sequence[Value]) -> Value:
    """An operator on typed values as ATen nodes."""
    return LOWERINGS[op](nodes, given, attributes)  # type: ignore[arg-type]


def plain(value: float) -> int | float:
    """A number as a whole one where it is one."""
    return int(value) if value == int(value) else value
