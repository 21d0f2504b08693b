"""Products that share an input as one product: one action for all of them at once, not pair by pair.

Pairwise merges of n siblings make 2^n graphs; this one makes one graph for each group. Members that need each other's
results are not merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from steptime.captured.aten import layers, maths, views
from steptime.captured.graph import Node, Nodes, Value
from steptime.rewrite.flow import Flow
from steptime.rewrite.saturation.language import padded
from steptime.rewrite.scene import Match, Pass, Scene, number, shape_text

MOST: Final = 64
"""Members of one merge."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of sibling: which inputs are shared and which joined."""

    op: str
    shared: str
    joined: str
    joined_dim: int
    """The dim of the joined input along which it is joined, from the last."""
    out_dim: int


KINDS: Final = (
    _Kind("mm", "self", "mat2", -1, -1),
    _Kind("mm", "mat2", "self", -2, -2),
    _Kind("bmm", "self", "mat2", -1, -1),
    _Kind("bmm", "mat2", "self", -2, -2),
    _Kind("addmm", "mat1", "mat2", -1, -1),
    _Kind("addmm", "mat2", "mat1", -2, -2),
    _Kind("convolution", "input", "weight", 0, 1),
)


def _find(scene: Scene) -> Iterator[Match]:
    reach: _Reach | None = None
    for kind in KINDS:
        groups: dict[tuple[object, ...], list[Node]] = {}
        for node in scene.each(kind.op):
            key = _key(scene, kind, node)
            if key is not None:
                groups.setdefault(key, []).append(node)
        for members in groups.values():
            if len(members) < 2:
                continue
            reach = reach or _Reach(scene.flow)
            for group in reach.independent(members):
                if len(group) > 1:
                    yield from _merged(scene, kind, group[:MOST])


def _key(scene: Scene, kind: _Kind, node: Node) -> tuple[object, ...] | None:
    """What members of a group have in common; None where a node is no member of any."""
    shared, joined = node.input(kind.shared), node.input(kind.joined)
    if shared is None or joined is None or shared == joined or node in scene.flow.constant:
        return None
    if kind.op == "convolution":
        return _convolution_key(scene, node, shared)
    if kind.op == "addmm":
        bias = node.inputs[0]
        plain = all(number(node, name) in (None, 1.0) for name in ("alpha", "beta"))
        if not plain or bias.type.rank != 1 or (kind.shared == "mat1" and bias.type.shape[0] == 1):
            return None
        return (shared, bias if kind.shared == "mat2" else None)
    return (shared,)


def _convolution_key(scene: Scene, node: Node, shared: Value) -> tuple[object, ...] | None:
    """Convolutions of one input merge where a zero border makes their kernels equally large."""
    weight, bias = node.input("weight"), node.input("bias")
    if weight is None or node.attribute("transposed") or node.attribute("groups", 1) != 1:
        return None
    pads, dilation = _integers(node, "padding"), _integers(node, "dilation")
    kernel = weight.type.shape[2:]
    if set(dilation) != {1} or len(set(pads)) != 1 or len(set(kernel)) != 1 or not scene.is_weight(weight):
        return None
    if bias is not None and not scene.is_weight(bias):
        return None
    # With a border of b the pad is p + b, so kernel - 2 pad is what members have in common.
    return (shared, _integers(node, "stride"), kernel[0] - 2 * pads[0], len(kernel), bias is None)


def _integers(node: Node, name: str) -> tuple[int, ...]:
    found = node.attribute(name, ())
    return tuple(int(str(item)) for item in found) if isinstance(found, tuple) else (int(str(found)),)


def _merged(scene: Scene, kind: _Kind, members: Sequence[Node]) -> Iterator[Match]:
    parts = [value for node in members if (value := node.input(kind.joined)) is not None]
    steady = all(map(scene.is_weight, parts))
    nodes = scene.nodes
    whole = _ROWS[kind.op](scene, kind, members, parts) if kind.op in _ROWS else None
    if whole is None:
        joined = views.cat(nodes, parts, parts[0].type.rank + kind.joined_dim)
        joined = scene.constant(joined) if steady else joined
        first = members[0]
        given = [
            joined if name == kind.joined else value for name, value in zip(first.names, first.inputs, strict=True)
        ]
        whole = (maths.mm if kind.op == "mm" else maths.bmm)(nodes, *given)
    replace: dict[Value, Value] = {}
    at = 0
    for node in members:
        extent = node.outputs[0].shape[kind.out_dim]
        replace[node.value()] = views.slice(nodes, whole, kind.out_dim, at, at + extent)
        at += extent
    if all(old.type.dtype == new.type.dtype for old, new in replace.items()):
        shared = members[0].input(kind.shared)
        assert shared is not None
        yield Match(root=members[0], replace=replace, what=f"{len(members)} of {shape_text(shared.type)}")


def _addmm(scene: Scene, kind: _Kind, members: Sequence[Node], parts: Sequence[Value]) -> Value:
    nodes = scene.nodes
    joined = views.cat(nodes, parts, 2 + kind.joined_dim)
    joined = scene.constant(joined) if all(map(scene.is_weight, parts)) else joined
    bias, left, right = members[0].inputs
    if kind.shared == "mat2":
        return maths.addmm(nodes, bias, joined, right)
    biases = [node.inputs[0] for node in members]
    whole = views.cat(nodes, biases, 0)
    return maths.addmm(nodes, scene.constant(whole) if all(map(scene.is_weight, biases)) else whole, left, joined)


def _convolution(scene: Scene, kind: _Kind, members: Sequence[Node], parts: Sequence[Value]) -> Value:
    nodes, first = scene.nodes, members[0]
    rank = parts[0].type.rank - 2
    largest = max(part.type.shape[-1] for part in parts)
    kernels = [_bordered(nodes, part, (largest - part.type.shape[-1]) // 2) for part in parts]
    weight = scene.constant(views.cat(nodes, kernels, 0))
    biases = [value for node in members if (value := node.input("bias")) is not None]
    bias = scene.constant(views.cat(nodes, biases, 0)) if biases else None
    pad = _integers(first, "padding")[0] + (largest - parts[0].type.shape[-1]) // 2
    shared = first.input("input")
    assert shared is not None
    return layers.convolution(
        nodes, shared, weight, bias, stride=_integers(first, "stride"), padding=(pad,) * rank, dilation=(1,)
    )


def _bordered(nodes: Nodes, weight: Value, border: int) -> Value:
    return padded(nodes, weight, (border,) * 2 * (weight.type.rank - 2)) if border else weight


_ROWS: Final = {"addmm": _addmm, "convolution": _convolution}


class _Reach:
    """Which nodes are needed by which, as sets of bits."""

    def __init__(self, flow: Flow) -> None:
        self._order = {node: at for at, node in enumerate(flow.order)}
        self._below: list[int] = []
        for node in flow.order:
            bits = 0
            for source in {value.node for value in node.inputs}:
                at = self._order[source]
                bits |= self._below[at] | 1 << at
            self._below.append(bits)

    def independent(self, members: Sequence[Node]) -> list[list[Node]]:
        """Groups of members none of which needs another of its group; each member in the first group that it fits."""
        groups: list[tuple[list[Node], int]] = []
        for node in sorted(members, key=self._order.__getitem__):
            below = self._below[self._order[node]]
            for at, (group, bits) in enumerate(groups):
                if not below & bits:
                    groups[at] = ([*group, node], bits | 1 << self._order[node])
                    break
            else:
                groups.append(([node], 1 << self._order[node]))
        return [group for group, _ in groups]


SIBLINGS: Final = Pass(
    name="merge siblings",
    matches="all matrix products, or convolutions, of one input that do not need each other, left or right",
    condition="convolutions: constant weights, equal strides, kernels that a zero border makes equal",
    makes="one product with the other inputs joined, and slices of it",
    source="Jia et al., MetaFlow, SysML 2019; pairs by Yang et al., Tensat, MLSys 2021",
    find=_find,
    reorders=True,
)
