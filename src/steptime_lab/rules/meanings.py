"""Translation of operators of captured graphs into operators of rules, for one float type or as movements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Final

from steptime.captured.graph import Node
from steptime.captured.graph.strides import wrap
from steptime.captured.ops import OF_MATRICES
from steptime.rewrite.scene import number
from steptime_lab.rules.domains import FUNCTIONS
from steptime_lab.rules.terms import Term

if TYPE_CHECKING:
    from steptime_lab.rules.graphs import Terms

Made = Term | None
Define = Callable[["Terms", Node, Sequence[Term]], Sequence[Made] | None]
"""Function from terms of the inputs to the term of each output; None: rules have no operator for it."""


def _integers(node: Node, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
    found = node.attribute(name)
    if found is None:
        return default
    return tuple(int(str(item)) for item in found) if isinstance(found, tuple) else (int(str(found)),)


def _integer(node: Node, name: str, default: int) -> int:
    return (*_integers(node, name), default)[0]


def _single(row: Callable[[Terms, Node, Sequence[Term]], Made]) -> Define:
    return lambda terms, node, given: (row(terms, node, given),)


def _plain(op: str) -> Define:
    """An operator whose only arguments are tensors."""
    return _single(lambda terms, node, given: terms.make(op, (), *given))


def _binary(op: str) -> Define:
    def row(terms: Terms, node: Node, given: Sequence[Term]) -> Made:
        if len(given) != 2 or number(node, "alpha") not in (None, 1.0) or node.attribute("rounding_mode"):
            return None
        return terms.make(op, (), *given)

    return _single(row)


def _mul(terms: Terms, node: Node, given: Sequence[Term]) -> Made:
    factor = number(node, "other")
    if len(given) == 1 and factor is not None and isfinite(factor):
        return terms.make("scale", (factor,), *given)
    return terms.make("mul", (), *given) if len(given) == 2 else None


def _div(terms: Terms, node: Node, given: Sequence[Term]) -> Made:
    by = number(node, "other")
    if node.attribute("rounding_mode") is not None:
        return None
    if len(given) == 1 and by:
        return terms.make("scale", (1 / by,), *given)
    return None


def _power(terms: Terms, node: Node, given: Sequence[Term]) -> Made:
    twice = len(given) == 1 and number(node, "exponent") == 2.0
    return terms.make("mul", (), given[0], given[0]) if twice else None


def _product(terms: Terms, node: Node, given: Sequence[Term]) -> Made:
    if any(number(node, name) not in (None, 1.0) for name in ("alpha", "beta")):
        return None
    *added, a, b = given
    made = terms.make("matmul", (), a, b)
    return terms.make("add", (), made, *added) if added else made


def _convolution(terms: Terms, node: Node, given: Sequence[Term]) -> Made:
    settings = [set(_integers(node, name)) for name in ("stride", "padding", "dilation")]
    if node.attribute("transposed") or len(node.inputs[0].type.shape) != 4 or any(len(s) != 1 for s in settings):
        return None
    stride, pad, dilation = (each.pop() for each in settings)
    made = terms.make("conv", (stride, pad, dilation, _integer(node, "groups", 1)), *given[:2])
    if len(given) == 2:
        return made
    return terms.make("add", (), made, terms.make("reshape", (node.outputs[0].shape[1], 1, 1), given[2]))


def _pool(op: str) -> Define:
    def row(terms: Terms, node: Node, given: Sequence[Term]) -> Sequence[Made] | None:
        kernel = _integers(node, "kernel_size")
        stride = _integers(node, "stride") or kernel
        pad = _integers(node, "padding", (0,))
        plain = not node.attribute("ceil_mode") and set(_integers(node, "dilation", (1,))) == {1}
        plain &= node.attribute("divisor_override") is None and node.attribute("count_include_pad", True) is not False
        if not plain or any(len(set(each)) != 1 for each in (kernel, stride, pad)):
            return None
        made = terms.make(op, (kernel[0], stride[0], pad[0]), *given)
        return (made, *(None for _ in node.outputs[1:]))

    return row


def _softmax(terms: Terms, node: Node, given: Sequence[Term]) -> Made:
    rank = node.inputs[0].type.rank
    return terms.make("softmax", (wrap(_integer(node, "dim", -1), rank) - rank,), *given) if rank else None


def _reduction(op: str) -> Define:
    def row(terms: Terms, node: Node, given: Sequence[Term]) -> Made:
        rank = node.inputs[0].type.rank
        dims = _integers(node, "dim") or tuple(range(rank))
        made: Made = given[0]
        for dim in sorted({wrap(each, rank) - rank for each in dims}) if rank else ():
            made = terms.make(op, (dim,), made)
        return terms.make("reshape", node.outputs[0].shape, made)

    return _single(row)


# Movements


def _cat(terms: Terms, node: Node, given: Sequence[Term]) -> Made:
    rank = node.outputs[0].rank
    if any(value.type.rank != rank for value in node.inputs):
        return None
    return terms.make("concat", (wrap(_integer(node, "dim", 0), rank) - rank,), *given)


def _cut(terms: Terms, node: Node, given: Sequence[Term], dim: int, start: int, extent: int) -> Made:
    rank = node.inputs[0].type.rank
    return terms.make("slice", (wrap(dim, rank) - rank, start, start + extent), *given)


def _slice(terms: Terms, node: Node, given: Sequence[Term]) -> Made:
    (x,), dim = node.inputs, _integer(node, "dim", 0)
    if _integer(node, "step", 1) != 1:
        return None
    size, start = x.type.shape[dim], _integer(node, "start", 0)
    start = min(max(start + size if start < 0 else start, 0), size)
    return _cut(terms, node, given, dim, start, node.outputs[0].shape[dim])


def _select(terms: Terms, node: Node, given: Sequence[Term]) -> Made:
    dim, index = _integer(node, "dim", 0), _integer(node, "index", 0)
    made = _cut(terms, node, given, dim, index % node.inputs[0].type.shape[dim], 1)
    return terms.make("reshape", node.outputs[0].shape, made)


def _split(terms: Terms, node: Node, given: Sequence[Term]) -> Sequence[Made]:
    dim, at, out = _integer(node, "dim", 0), 0, list[Made]()
    for type in node.outputs:
        out.append(_cut(terms, node, given, dim, at, type.shape[dim]))
        at += type.shape[dim]
    return out


def _unbind(terms: Terms, node: Node, given: Sequence[Term]) -> Sequence[Made]:
    dim = _integer(node, "dim", 0)
    parts = [_cut(terms, node, given, dim, at, 1) for at in range(len(node.outputs))]
    return [terms.make("reshape", type.shape, each) for type, each in zip(node.outputs, parts, strict=True)]


def _permute(terms: Terms, node: Node, given: Sequence[Term]) -> Made:
    rank = node.outputs[0].rank
    return terms.make("permute", tuple(wrap(each, rank) - rank for each in _integers(node, "dims")), *given)


def _transpose(terms: Terms, node: Node, given: Sequence[Term]) -> Made:
    rank = node.outputs[0].rank
    if rank < 2:
        return None
    pair = [wrap(_integer(node, name, at), rank) - rank for at, name in enumerate(("dim0", "dim1"))]
    return terms.make("transpose", tuple(sorted(pair, reverse=True)), *given)


def _expand(terms: Terms, node: Node, given: Sequence[Term]) -> Made:
    shape, old = node.outputs[0].shape, node.inputs[0].type.shape
    old = (1,) * (len(shape) - len(old)) + old
    made = terms.make("reshape", old, *given)
    for axis in range(-len(shape), 0):
        if shape[axis] != old[axis]:
            made = terms.make("expand", (axis, shape[axis]), made)
    return made


def _pad(terms: Terms, node: Node, given: Sequence[Term]) -> Made:
    pads, made = _integers(node, "pad"), given[0]
    if any(each < 0 for each in pads) or number(node, "value") not in (None, 0.0):
        return None
    for at in range(len(pads) // 2):
        if any(pads[2 * at : 2 * at + 2]):
            next_one = terms.make("pad", (-1 - at, *pads[2 * at : 2 * at + 2]), made)
            if next_one is None:
                return None
            made = next_one
    return made


_reshape: Final = _single(lambda terms, node, given: terms.make("reshape", node.outputs[0].shape, *given))
_same: Final = _single(lambda terms, node, given: given[0])

MEANINGS: Final[Mapping[str, Define]] = {
    **{op: _binary(op) for op in ("add", "sub", "maximum")},
    **{row[0].removeprefix("aten."): _plain(op) for op, row in FUNCTIONS.items() if op != "gelu"},
    "gelu": _single(
        lambda terms, node, given: (
            terms.make("gelu", (), *given) if node.attribute("approximate", "none") == "none" else None
        )
    ),
    "mul": _single(_mul),
    "div": _single(_div),
    "pow": _single(_power),
    **{op: _single(_product) for op in (*OF_MATRICES, "bmm")},
    "convolution": _single(_convolution),
    "avg_pool2d": _pool("avgpool"),
    "max_pool2d_with_indices": _pool("maxpool"),
    "_softmax": _single(_softmax),
    "sum": _reduction("sum"),
    "mean": _reduction("mean"),
    "amax": _reduction("max"),
    "cat": _single(_cat),
    "slice": _single(_slice),
    "select": _single(_select),
    "split": _split,
    "split_with_sizes": _split,
    "unbind": _unbind,
    "permute": _single(_permute),
    "transpose": _single(_transpose),
    "t": _single(_transpose),
    "expand": _single(_expand),
    "constant_pad_nd": _single(_pad),
    **dict.fromkeys(("view", "_unsafe_view", "_reshape_alias", "squeeze", "unsqueeze"), _reshape),
    **dict.fromkeys(("detach", "alias", "lift_fresh"), _same),
}
"""ATen operator -> its meaning."""
