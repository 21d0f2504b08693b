"""Search moves that merge, enlarge and join convolutions and products; some cost more but enable others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

from steptime.captured.graph import Node, TensorType, Value
from steptime.captured.graph.strides import tensor_type, wrap
from steptime.captured.ops import OF_MATRICES, addend, making
from steptime.rewrite.flow import CONV_RELU
from steptime.rewrite.passes.fusion import needs
from steptime.rewrite.retype import POINTWISE
from steptime.rewrite.scene import Match, Pass, Scene, is_op, number, operands, shape_text

_WINDOW: Final = ("stride", "padding", "dilation")


def integers(node: Node, name: str) -> tuple[int, ...]:
    """An attribute of a convolution, one number per dim."""
    found = node.attribute(name, ())
    given = found if isinstance(found, tuple) else (found,)
    return making.spatial([int(str(item)) for item in given], node.outputs[0].rank - 2)


def _convs(scene: Scene) -> Iterator[Node]:
    """Convolutions with constant weights, other than transposed ones."""
    for node in scene.each("convolution"):
        rest = [value for value in node.inputs[1:] if not scene.is_weight(value)]
        if not rest and not node.attribute("transposed") and not scene.is_weight(node.inputs[0]):
            yield node


def groups_of(node: Node) -> int:
    """Groups of a convolution."""
    return int(str(node.attribute("groups", 1)))


def again(
    scene: Scene, node: Node, inputs: tuple[Value, Value, Value | None], parts: int = 1, grown: Iterable[int] = ()
) -> Value:
    """The convolution of a node with other inputs and weights, and with the padding enlarged by ``grown``."""
    padding = integers(node, "padding")
    return making.convolution(
        scene.nodes,
        *inputs,
        stride=integers(node, "stride"),
        padding=[p + more for p, more in zip(padding, grown or (0,) * len(padding), strict=True)],
        dilation=integers(node, "dilation"),
        groups=parts,
    )


def _kind(node: Node) -> tuple[object, ...]:
    """Key of convolutions that can be merged."""
    return (*(integers(node, name) for name in _WINDOW), node.inputs[1].type.shape[2:], len(node.inputs))


def slices(scene: Scene, whole: Value, members: list[Node], dim: int) -> dict[Value, Value]:
    """Results of several operators as slices of one result, along a dim."""
    replace, at = {}, 0
    for node in members:
        width = node.outputs[0].shape[dim]
        replace[node.value()] = making.slice(scene.nodes, whole, dim, at, at + width)
        at += width
    return replace


def _joined(scene: Scene, values: list[Value], dim: int = 0) -> Value:
    return scene.constant(making.cat(scene.nodes, values, dim))


def _merged(scene: Scene) -> Iterator[Match]:
    """Convolutions of one tensor with equal windows become one with more channels, and slices of it."""
    found: dict[object, list[Node]] = defaultdict(list)
    for node in _convs(scene):
        if groups_of(node) == 1:
            found[node.inputs[0], _kind(node)].append(node)
    for members in found.values():
        if len(members) > 1:
            x = members[0].inputs[0]
            weight, *bias = (
                _joined(scene, [node.inputs[n] for node in members]) for n in range(1, len(members[0].inputs))
            )
            whole = again(scene, members[0], (x, weight, next(iter(bias), None)))
            widths = TensorType(tuple(node.outputs[0].shape[1] for node in members), x.type.dtype)
            what = f"{shape_text(x.type)} to channels {shape_text(widths)}"
            yield Match(root=members[0], replace=slices(scene, whole, members, 1), what=what)


def _padded(scene: Scene, value: Value, pads: list[tuple[int, int]]) -> Value:
    """A tensor padded with zeros; ATen takes the padding of the last dims first."""
    flat = tuple(each for pair in reversed(pads) for each in pair)
    shape = [n + sum(pair) for n, pair in zip(value.type.shape, pads, strict=True)]
    type = tensor_type(shape, value.type.dtype)
    made = scene.nodes.apply("constant_pad_nd", {"self": value}, {"pad": flat, "value": 0.0}, outputs=[type])
    return made.value()


def _enlarged(scene: Scene) -> Iterator[Match]:
    """A convolution gets the larger kernel of another one of the same input, with zeros around its own."""
    found: dict[Value, list[Node]] = defaultdict(list)
    for node in _convs(scene):
        if groups_of(node) == 1:
            found[node.inputs[0]].append(node)
    for x, members in found.items():
        kernels = dict.fromkeys(tuple(node.inputs[1].type.shape[2:]) for node in members)
        for node in members:
            own = node.inputs[1].type.shape[2:]
            for kernel in kernels:
                grown = [(b - a) // 2 for a, b in zip(own, kernel, strict=True)]
                even = all(b >= a and (b - a) % 2 == 0 for a, b in zip(own, kernel, strict=True))
                if kernel == own or not even or set(integers(node, "dilation")) != {1}:
                    continue
                weight = _padded(scene, node.inputs[1], [(0, 0), (0, 0), *((n, n) for n in grown)])
                bias = node.inputs[2] if len(node.inputs) > 2 else None
                made = again(scene, node, (x, scene.constant(weight), bias), grown=grown)
                if made.type == node.outputs[0]:
                    to = "x".join(map(str, kernel))
                    what = f"{shape_text(node.inputs[1].type)} to {to}"
                    yield Match(root=node, replace={node.value(): made}, what=what)


def _sums(scene: Scene) -> Iterator[Match]:
    """conv(x, W) + conv(y, V) becomes one convolution of the joined inputs."""
    nodes = scene.nodes
    for node in scene.each("add"):
        pair = operands(node)
        if pair is None or pair[0] == pair[1] or not all(is_op(v, "convolution") and scene.only_use(v) for v in pair):
            continue
        a, b = (value.node for value in pair)
        both = set(_convs(scene))
        kinds = [(*_kind(each)[:-1], each.inputs[0].type.shape[2:], groups_of(each)) for each in (a, b)]
        if not {a, b} <= both or kinds[0] != kinds[1] or kinds[0][-1] != 1:
            continue
        x, y = a.inputs[0], b.inputs[0]
        if x.type.dtype != y.type.dtype or pair[0].type != pair[1].type:
            continue
        biases = [each.inputs[2] for each in (a, b) if len(each.inputs) > 2]
        bias = scene.constant(making.add(nodes, *biases)) if len(biases) == 2 else next(iter(biases), None)
        weight = _joined(scene, [a.inputs[1], b.inputs[1]], 1)
        made = again(scene, a, (making.cat(nodes, [x, y], 1), weight, bias))
        if made.type == node.outputs[0]:
            yield Match(root=node, replace={node.value(): made}, what=shape_text(x.type, y.type))


def _fewer_groups(scene: Scene) -> Iterator[Match]:
    """Groups of a convolution are merged by a power of two, with zeros between channels of different groups."""
    nodes = scene.nodes
    for node in _convs(scene):
        groups, weight = groups_of(node), node.inputs[1]
        factor = 2
        while groups % factor == 0:
            out, channels, *kernel = weight.type.shape
            rows = making.reshape(nodes, weight, (groups // factor, factor, out // groups, channels, *kernel))
            parts = []
            for n in range(factor):
                part = making.slice(nodes, rows, 1, n, n + 1)
                around = (channels * n, channels * (factor - 1 - n))
                parts.append(_padded(scene, part, [(0, 0), (0, 0), (0, 0), around, *((0, 0) for _ in kernel)]))
            wide = making.reshape(nodes, making.cat(nodes, parts, 1), (out, channels * factor, *kernel))
            bias = node.inputs[2] if len(node.inputs) > 2 else None
            made = again(scene, node, (node.inputs[0], scene.constant(wide), bias), groups // factor)
            what = f"{shape_text(node.inputs[0].type)}, {groups} groups to {groups // factor}"
            yield Match(root=node, replace={node.value(): made}, what=what)
            factor *= 2


def _conv_relu(scene: Scene) -> Iterator[Match]:
    for node in scene.each("relu"):
        x = node.inputs[0]
        if not is_op(x, "convolution") or not scene.only_use(x) or x.node not in set(_convs(scene)):
            continue
        conv = x.node
        inputs = dict(zip(("self", "weight", "bias"), conv.inputs, strict=False))
        attributes = {name: integers(conv, name) for name in _WINDOW}
        made = scene.nodes.apply(CONV_RELU, inputs, {**attributes, "groups": groups_of(conv)}, outputs=conv.outputs)
        if made.outputs == node.outputs:
            what = shape_text(conv.inputs[0].type, conv.inputs[1].type)
            yield Match(root=node, replace={node.value(): made.value()}, what=what)


def _product_sums(scene: Scene) -> Iterator[Match]:
    """x A + y B becomes one product of the joined operands."""
    nodes = scene.nodes
    for node in scene.each("add"):
        pair = operands(node)
        if pair is None or not all(is_op(v, *OF_MATRICES) and scene.only_use(v) for v in pair) or pair[0] == pair[1]:
            continue
        a, b = (value.node for value in pair)
        plain = not any(number(each, name) not in (None, 1.0) for each in (a, b) for name in ("alpha", "beta"))
        biases = [bias for each in (a, b) if (bias := addend(each)) is not None]
        (x, left), (y, right) = a.inputs[-2:], b.inputs[-2:]
        if not plain or not all(map(scene.is_weight, (left, right, *biases))) or pair[0].type != pair[1].type:
            continue
        weight = _joined(scene, [left, right], 0)
        wide = making.cat(nodes, [x, y], 1)
        bias = scene.constant(making.add(nodes, *biases)) if len(biases) == 2 else next(iter(biases), None)
        made = making.mm(nodes, wide, weight, bias)
        if made.type == node.outputs[0]:
            yield Match(root=node, replace={node.value(): made}, what=shape_text(x.type, y.type, left.type))


def _shared_weights(scene: Scene) -> Iterator[Match]:
    """Products of several tensors with one weight become one product of the joined rows, and slices of it."""
    found: dict[object, list[Node]] = defaultdict(list)
    for node in scene.each(*OF_MATRICES):
        x, weight = node.inputs[-2:]
        plain = not any(number(node, name) not in (None, 1.0) for name in ("alpha", "beta"))
        bias = addend(node)
        fits = bias is None or (scene.is_weight(bias) and bias.type.rank == 1)
        if plain and fits and scene.is_weight(weight) and not scene.is_weight(x):
            found[node.op, node.inputs[:-2], weight].append(node)
    for group in found.values():
        members = _independent(scene, group) if len(group) > 1 else []
        if len(members) < 2:
            continue
        wide = making.cat(scene.nodes, [node.inputs[-2] for node in members], 0)
        whole = making.mm(scene.nodes, wide, members[0].inputs[-1], addend(members[0]))
        what = f"{len(members)} of {shape_text(members[0].inputs[-2].type, weight.type)}"
        yield Match(root=members[0], replace=slices(scene, whole, members, 0), what=what)


def _independent(scene: Scene, group: list[Node]) -> list[Node]:
    """A greedy subset of nodes, none of which depends on another."""
    number, below = needs(scene.flow)
    chosen: list[Node] = []
    for node in sorted(group, key=number.__getitem__):
        if not any(below[node] >> number[other] & 1 for other in chosen):
            chosen.append(node)
    return chosen


def _concatenated(scene: Scene) -> Iterator[Match]:
    """A concatenation of equal element-wise operators, or of products with one weight, moves to their inputs."""
    for node in scene.each("cat"):
        parts = node.inputs
        if len(parts) < 2 or not all(scene.only_use(part) for part in parts) or any(p.index for p in parts):
            continue
        first, dim = parts[0].node, wrap(int(str(node.attribute("dim", 0))), node.outputs[0].rank)
        same = all(
            (p.node.op, p.node.attributes, p.node.names) == (first.op, first.attributes, first.names) for p in parts
        )
        alike = same and all(p.type.dtype == p.node.inputs[0].type.dtype for p in parts if p.node.inputs)
        made: Value | None = None
        if alike and first.op in POINTWISE and len(first.inputs) == 1 and not scene.is_weight(parts[0]):
            inner = making.cat(scene.nodes, [p.node.inputs[0] for p in parts], dim)
            made = scene.nodes.node(first.op, (inner,), first.names, first.attributes, (inner.type,)).value()
        elif same and first.op == "mm" and dim == 0 and len({p.node.inputs[1] for p in parts}) == 1:
            made = making.mm(
                scene.nodes, making.cat(scene.nodes, [p.node.inputs[0] for p in parts], 0), first.inputs[1]
            )
        if made is not None and made.type == node.outputs[0]:
            yield Match(root=node, replace={node.value(): made}, what=f"{first.op} {shape_text(made.type)}")


def _whole(scene: Scene) -> Iterator[Match]:
    """In a concatenation, adjacent slices of one tensor become one slice."""
    nodes = scene.nodes
    for node in scene.each("cat"):
        dim = wrap(int(str(node.attribute("dim", 0))), node.outputs[0].rank)
        parts: list[Value] = []
        for part in node.inputs:
            last = parts[-1] if parts else None
            span = None if last is None else _following(last, part, dim)
            if span is None:
                parts.append(part)
                continue
            source, start, end = span
            full = start == 0 and end == source.type.shape[dim]
            parts[-1] = source if full else making.slice(nodes, source, dim, start, end)
        if len(parts) == len(node.inputs):
            continue
        made = parts[0] if len(parts) == 1 else making.cat(nodes, parts, dim)
        if made.type == node.outputs[0]:
            yield Match(root=node, replace={node.value(): made}, what=shape_text(made.type))


def _following(a: Value, b: Value, dim: int) -> tuple[Value, int, int] | None:
    """The sliced tensor and the range of both slices, if one slice follows the other."""
    if not (is_op(a, "slice") and is_op(b, "slice")) or a.node.inputs[0] != b.node.inputs[0]:
        return None
    spans = []
    for value in (a, b):
        at = wrap(int(str(value.node.attribute("dim", 0))), value.type.rank)
        if at != dim or number(value.node, "step") not in (None, 1.0):
            return None
        start = int(number(value.node, "start") or 0)
        spans.append((start, start + value.type.shape[dim]))
    return (a.node.inputs[0], spans[0][0], spans[1][1]) if spans[0][1] == spans[1][0] else None


METAFLOW: Final = "Jia et al., MetaFlow, SysML 2019"
TASO: Final = "Jia et al., TASO, SOSP 2019"

PASSES: Final = (
    Pass(
        name="merged convolutions",
        matches="convolutions of one tensor with the same windows",
        condition="inference; weights constant; one group; not transposed",
        makes="one convolution with the output channels of all, and slices of it",
        source=METAFLOW,
        find=_merged,
        modes=("inference",),
    ),
    Pass(
        name="enlarged kernel",
        matches="a convolution next to one of the same tensor with a larger kernel",
        condition="inference; weights constant; one group; no dilation; the difference is even",
        makes="the larger kernel, zeros around the smaller: it costs more, and can then be merged",
        source=METAFLOW,
        find=_enlarged,
        modes=("inference",),
    ),
    Pass(
        name="sum of convolutions",
        matches="conv(x, W) + conv(y, V) with the same windows",
        condition="inference; weights constant; one group; nothing else reads them",
        makes="conv([x y], [W V])",
        source=TASO,
        find=_sums,
        modes=("inference",),
        reorders=True,
    ),
    Pass(
        name="fewer groups",
        matches="a convolution in an even number of groups",
        condition="inference; weights constant",
        makes="the same in 1/2, 1/4, ... of the groups, with blocks of zeros: more operations, larger products",
        source=TASO,
        find=_fewer_groups,
        modes=("inference",),
    ),
    Pass(
        name="convolution + ReLU",
        matches="a ReLU of a convolution",
        condition="inference; CUDA, whose library has it as one kernel; nothing else reads the convolution",
        makes="one kernel",
        source=TASO,
        find=_conv_relu,
        modes=("inference",),
        only_cuda=True,
    ),
    Pass(
        name="sum of products",
        matches="x A + y B",
        condition="inference; weights constant; nothing else reads the products",
        makes="[x y] [A; B]",
        source=TASO,
        find=_product_sums,
        modes=("inference",),
        reorders=True,
    ),
    Pass(
        name="shared weight",
        matches="products of several tensors with one weight, none of which needs another one",
        condition="inference; weights constant",
        makes="one product of the joined rows, and slices of it",
        source=TASO,
        find=_shared_weights,
        modes=("inference",),
    ),
    Pass(
        name="joined maps",
        matches="a concatenation of element-wise operators of one kind, or of products with one weight",
        condition="nothing else reads them",
        makes="the operator of the concatenation",
        source=TASO,
        find=_concatenated,
    ),
    Pass(
        name="joined slices",
        matches="a concatenation of slices of one tensor that follow each other",
        condition="the result lies in memory as before",
        makes="one slice, or the tensor",
        source=TASO,
        find=_whole,
        tidy=True,
    ),
)
