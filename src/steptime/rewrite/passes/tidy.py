"""Tidy passes: constant folding, common subexpressions, identities, views and copies that cancel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from steptime.captured.graph import Node, Value
from steptime.captured.graph.program import SOURCES
from steptime.captured.graph.strides import is_contiguous, strides_of, view_strides
from steptime.captured.ops import FREE, OPERATORS, making
from steptime.rewrite.flow import FUSED, is_pure
from steptime.rewrite.scene import Match, Pass, Scene, is_op, number, shape_text

OWN: Final = "definition"
TASO: Final = "Jia et al., TASO, SOSP 2019, section 5 (weights are folded after the search)"


def _constants(scene: Scene) -> Iterator[Match]:
    """Fold the last constant values before operators that are not constant."""
    flow = scene.flow
    works: dict[Node, bool] = {}
    wide = {node for node in flow.constant if node.op == "expand" and _leaves(scene, node.value())}
    for node in flow.order:
        if node not in flow.constant or node.op in SOURCES or node in wide:
            continue
        free = node.op in FREE
        works[node] = (not free) or any(works.get(value.node, False) for value in node.inputs)
        if not works[node] or node.op.startswith(("empty", "new_empty")):
            continue
        for index in range(len(node.outputs)):
            value = node.value(index)
            outside = _leaves(scene, value) or not wide.isdisjoint(flow.users.get(value, ()))
            if outside and flow.uses[value]:
                yield Match(
                    root=node, replace={value: scene.constant(value)}, what=f"{node.op} {shape_text(value.type)}"
                )


def _leaves(scene: Scene, value: Value) -> bool:
    """True if the step returns a constant value, or a node that is not constant reads it."""
    flow = scene.flow
    return value in flow.wanted or any(user not in flow.constant for user in flow.users.get(value, ()))


_COMMUTE: Final = ("add", "mul", "maximum", "minimum", "eq", "ne", "logical_and", "logical_or", "bitwise_and")


def _common(scene: Scene) -> Iterator[Match]:
    """Commutative operators on the same tensors in the other order become one; other equal nodes are one already."""
    seen: dict[object, Node] = {}
    for node in scene.each(*_COMMUTE):
        if len(node.inputs) != 2 or number(node, "alpha") not in (None, 1.0) or not is_pure(node):
            continue
        first = seen.setdefault((node.op, frozenset(node.inputs), node.attributes, node.outputs), node)
        if first is not node:
            yield Match(root=node, replace={node.value(): first.value()}, what=f"{node.op} {shape_text(*node.outputs)}")


_UNIT: Final[Mapping[str, float]] = {"add": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0, "pow": 1.0}
_INVERSE: Final = ("neg", "t", "logical_not", "bitwise_not", "reciprocal")
_IDEMPOTENT: Final = ("relu", "abs", "floor", "ceil", "round", "sign")
_NOTHING: Final = ("alias", "detach", "lift_fresh", "view", "_unsafe_view", "expand", "permute", "slice", "_to_copy")


def _identities(scene: Scene) -> Iterator[Match]:
    """Replace operators whose result is one of their inputs."""
    for node in scene.each():
        if not node.inputs or not node.outputs or node.op == FUSED:
            continue
        found = _same_as(node)
        if found is not None and found.type == node.outputs[0] and scene.flow.uses[node.value()]:
            yield Match(root=node, replace={node.value(): found}, what=f"{node.op} {shape_text(found.type)}")


def _same_as(node: Node) -> Value | None:
    x = node.inputs[0]
    inner = x.node if x.index == 0 else None
    if node.op in _UNIT and len(node.inputs) == 1:
        given = number(node, "exponent" if node.op == "pow" else "other")
        return x if given == _UNIT[node.op] and node.attribute("rounding_mode") is None else None
    if node.op == "cat":
        full = [part for part in node.inputs if part.type.elements]
        return full[0] if len(full) == 1 else None
    if node.op in _NOTHING:
        return x if node.op not in ("slice", "permute") or strides_of(x.type) == strides_of(node.outputs[0]) else None
    if node.op == "clone":
        return x if node.inputs[0].node.op not in SOURCES else None
    if node.op == "native_dropout" and (node.attribute("train") is False or number(node, "p") == 0.0):
        return x
    if inner is None or inner.op != node.op or not inner.inputs:
        return None
    if node.op in _INVERSE:
        return inner.inputs[0]
    if node.op == "transpose" and {node.attribute("dim0"), node.attribute("dim1")} == {
        inner.attribute("dim0"),
        inner.attribute("dim1"),
    }:
        return inner.inputs[0]
    return x if node.op in _IDEMPOTENT else None


def _stacked_views(scene: Scene) -> Iterator[Match]:
    """A reshape of a reshape, or a permutation of a permutation, becomes one view of the first tensor."""
    nodes = scene.nodes
    for node in scene.each("view", "_unsafe_view", "permute"):
        inner = node.inputs[0].node
        kind = ("permute",) if node.op == "permute" else ("view", "_unsafe_view", "_reshape_alias")
        if inner.op not in kind or not inner.inputs:
            continue
        source, type = inner.inputs[0], node.outputs[0]
        if node.op == "permute":
            orders = [each.attribute("dims") for each in (inner, node)]
            if not all(isinstance(order, tuple) for order in orders):
                continue
            first, then = ([int(str(d)) for d in order] for order in orders if isinstance(order, tuple))
            made = making.permute(nodes, source, [first[d] for d in then])
        elif view_strides(source.type, type.shape) == strides_of(type):
            made = making.reshape(nodes, source, type.shape)
        else:
            continue
        if made.type == type:
            yield Match(root=node, replace={node.value(): made}, what=f"{node.op} {shape_text(type)}")


_ANY_STRIDES: Final = {"cat", "sum", "mean", "amax", "_softmax"} | {
    name for name, row in OPERATORS.items() if row.layouts == "matrix"
}
"""Operators whose kernels read any layout with equal traffic and equal results."""


def _copies(scene: Scene) -> Iterator[Match]:
    """Remove a contiguous copy whose readers all accept strides."""
    flow, nodes = scene.flow, scene.nodes
    for node in scene.each("clone"):
        x, y = node.inputs[0], node.value()
        readers = flow.users.get(y, ())
        if is_contiguous(x.type) or y in flow.wanted or not readers:
            continue
        replace: dict[Value, Value] = {}
        for reader in readers:
            shown: Value | None = x
            if reader.op in ("view", "_unsafe_view"):
                y = reader.value()
                strides = view_strides(x.type, reader.outputs[0].shape)
                shown = None if strides is None else making.reshape(nodes, x, reader.outputs[0].shape)
            else:
                y = node.value()
            users = flow.users.get(y, ())
            takes = shown is not None and _reads_rows(shown) and y not in flow.wanted
            if not (takes and users and all(user.op in _ANY_STRIDES for user in users)) or shown is None:
                break
            replace[y] = shown
        else:
            yield Match(root=node, replace=replace, what=f"clone {shape_text(x.type)}")


def _reads_rows(value: Value) -> bool:
    """True if one of the last two dims is dense in memory, as BLAS libraries require."""
    type = value.type
    if type.rank < 2:
        return True
    rows, columns = strides_of(type)[-2:]
    return (columns == 1 and rows >= type.shape[-1]) or (rows == 1 and columns >= type.shape[-2])


def _selected(scene: Scene) -> Iterator[Match]:
    """A slice of a concatenation that equals one of its parts becomes the part."""
    for node in scene.each("slice", "split_with_sizes", "split"):
        joined = node.inputs[0].node
        if not is_op(node.inputs[0], "cat") or joined.attribute("dim", 0) != node.attribute("dim", 0):
            continue
        dim = int(str(joined.attribute("dim", 0)))
        starts, at = {}, 0
        for part in joined.inputs:
            starts[at] = part
            at += part.type.shape[dim]
        replace: dict[Value, Value] = {}
        begin = int(str(node.attribute("start", 0) or 0)) if node.op == "slice" else 0
        for index, type in enumerate(node.outputs):
            found = starts.get(begin)
            begin += type.shape[dim]
            if found is not None and found.type.shape == type.shape and number(node, "step") in (None, 1.0):
                replace[node.value(index)] = found
        if replace:
            yield Match(root=node, replace=replace, what=f"{node.op} {shape_text(node.outputs[0])}")


PASSES: Final = (
    Pass(
        name="constant folding",
        matches="operators whose inputs are all weights or numbers",
        condition="weights do not change (inference); fills and ranges in training too; nothing random or opaque",
        makes="a constant that is computed once, before the run",
        source=TASO,
        find=_constants,
    ),
    Pass(
        name="common subexpression",
        matches="sums, products and comparisons of the same tensors in the other order",
        condition="the operator commutes, and no factor stands between",
        makes="the first of them",
        source=OWN,
        find=_common,
        tidy=True,
    ),
    Pass(
        name="identity",
        matches="x + 0, 1 x, x / 1, casts to the same type, copies, -(-x), (x^T)^T, relu(relu(x))",
        condition="result and input have the same shape, element type and strides",
        makes="the input",
        source=OWN,
        find=_identities,
        tidy=True,
    ),
    Pass(
        name="stacked views",
        matches="a reshape of a reshape, a permutation of a permutation",
        condition="the strides of the first tensor show the last shape without a copy",
        makes="one view",
        source=OWN,
        find=_stacked_views,
        tidy=True,
    ),
    Pass(
        name="slice of concatenation",
        matches="a slice or split along the dim of a concatenation",
        condition="it is exactly one of the parts",
        makes="the part",
        source="Jia et al., TASO, SOSP 2019: split undoes concat",
        find=_selected,
        tidy=True,
    ),
    Pass(
        name="view elimination",
        matches="a contiguous copy of a strided tensor, with a reshape behind it or without",
        condition="all readers take strides at the same traffic, and one of the last two dims is dense",
        makes="the strided tensor itself: no traffic, no launch",
        source="seed document on strides and contiguity",
        find=_copies,
    ),
)
