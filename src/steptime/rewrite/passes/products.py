"""Passes on products and convolutions: folded norms, biases, merged siblings, common factors, reassociation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from steptime.captured.graph import Node, TensorType, Value
from steptime.captured.graph.strides import is_contiguous
from steptime.captured.ops import OF_MATRICES, addend, making
from steptime.rewrite.passes.convolutions import again, groups_of, slices
from steptime.rewrite.scene import Match, Pass, Scene, is_op, number, operands, shape_text

_BATCH_NORMS: Final = (
    "native_batch_norm",
    "cudnn_batch_norm",
    "_native_batch_norm_legit_no_training",
    "_batch_norm_no_update",
    "miopen_batch_norm",
)
_VIEW: Final = ("view", "_unsafe_view")


def _norm_parts(node: Node) -> tuple[Value | None, Value | None, Value, Value, float] | None:
    """Weight, bias, mean, variance and epsilon of a batch norm with running statistics; None: it is another one."""
    names = dict(zip(node.names, node.inputs, strict=True))
    mean, variance = names.get("running_mean"), names.get("running_var")
    eps = number(node, "eps") if number(node, "eps") is not None else number(node, "epsilon")
    trains = node.attribute("training", node.attribute("train", False))
    if mean is None or variance is None or eps is None or trains:
        return None
    return names.get("weight"), names.get("bias"), mean, variance, eps


def _conv_norm(scene: Scene) -> Iterator[Match]:
    nodes = scene.nodes
    for node in scene.each(*_BATCH_NORMS):
        parts, x = _norm_parts(node), node.inputs[0]
        if parts is None or not is_op(x, "convolution") or not scene.only_use(x):
            continue
        conv = x.node
        weight, bias = conv.input("weight"), conv.input("bias")
        known = [value for value in (weight, bias, *parts[:4]) if value is not None]
        if weight is None or not all(map(scene.is_weight, known)) or conv.attribute("transposed"):
            continue
        gamma, beta, mean, variance, eps = parts
        scale = making.unary(nodes, "rsqrt", making.add(nodes, variance, eps))
        scale = scale if gamma is None else making.mul(nodes, scale, gamma)
        column = making.reshape(nodes, scale, (weight.type.shape[0], *(1,) * (weight.type.rank - 1)))
        shift = mean if bias is None else making.sub(nodes, mean, bias)
        shift = making.unary(nodes, "neg", making.mul(nodes, shift, scale))
        shift = shift if beta is None else making.add(nodes, shift, beta)
        folded = [making.to(nodes, each, weight.type.dtype) for each in (making.mul(nodes, weight, column), shift)]
        made = again(
            scene, conv, (conv.inputs[0], scene.constant(folded[0]), scene.constant(folded[1])), groups_of(conv)
        )
        if made.type.shape == node.outputs[0].shape:
            yield Match(root=node, replace={node.value(): made}, what=shape_text(x.type, weight.type))


def _bias(scene: Scene) -> Iterator[Match]:
    """A sum with a product, also through a reshape, becomes a product that adds in its epilogue."""
    nodes = scene.nodes
    for node in scene.each("add"):
        pair = operands(node)
        for product, other in () if pair is None else (pair, pair[::-1]):
            inner = product.node.inputs[0] if is_op(product, *_VIEW) else product
            if not is_op(inner, "mm") or not (scene.only_use(product) and scene.only_use(inner)):
                continue
            if other.node is inner.node or other.type.dtype != inner.type.dtype:
                continue
            rows, columns = inner.type.shape
            shape = product.type.shape
            if other.type.shape == (columns,) == shape[-1:]:
                added = other
            elif other.type.shape == shape and is_contiguous(other.type) and shape == node.outputs[0].shape:
                added = making.reshape(nodes, other, (rows, columns))
            else:
                continue
            a, b = inner.node.inputs
            made = making.reshape(nodes, making.mm(nodes, a, b, added), shape)
            if made.type.shape == node.outputs[0].shape and made.type.dtype == node.outputs[0].dtype:
                yield Match(root=node, replace={node.value(): made}, what=shape_text(a.type, b.type, added.type))
                break


def _siblings(scene: Scene) -> Iterator[Match]:
    """Products of one tensor with several weights become one product with the joined weights, and slices of it."""
    groups: dict[tuple[Value, str], list[Node]] = {}
    for node in scene.each(*OF_MATRICES):
        x, weight = node.inputs[-2:]
        bias = addend(node)
        plain = not any(number(node, name) not in (None, 1.0) for name in ("alpha", "beta"))
        fits = bias is None or (scene.is_weight(bias) and bias.type.shape == weight.type.shape[1:])
        if plain and fits and scene.is_weight(weight) and not scene.is_weight(x) and len(node.inputs) < 4:
            groups.setdefault((x, node.op), []).append(node)
    for (x, _), found in groups.items():
        members = list(dict.fromkeys(found))
        if len(members) < 2:
            continue
        nodes = scene.nodes
        weight = scene.constant(_joined(scene, [node.inputs[-1] for node in members], 1))
        biases = [bias for node in members if (bias := addend(node)) is not None]
        whole = making.mm(nodes, x, weight, scene.constant(making.cat(nodes, biases, 0)) if biases else None)
        widths = TensorType(tuple(node.outputs[0].shape[1] for node in members), x.type.dtype)
        what = f"{shape_text(x.type)} with widths {shape_text(widths)}"
        yield Match(root=members[0], replace=slices(scene, whole, members, 1), what=what)


def _joined(scene: Scene, weights: list[Value], dim: int) -> Value:
    """Weights joined along a dim; transposed weights are joined as stored, so that their layout stays."""
    nodes = scene.nodes
    if all(weight.node.op == "t" for weight in weights):
        stored = scene.constant(making.cat(nodes, [weight.node.inputs[0] for weight in weights], 1 - dim))
        return making.t(nodes, stored)
    return making.cat(nodes, weights, dim)


def _chain(scene: Scene) -> Iterator[Match]:
    """(a b) c becomes a (b c), or the reverse, if that has fewer operations."""
    nodes = scene.nodes
    for node in scene.each(*OF_MATRICES):
        left, right = node.inputs[-2:]
        bias = addend(node)
        if any(number(node, name) not in (None, 1.0) for name in ("alpha", "beta")):
            continue
        m, n = node.outputs[0].shape
        if is_op(left, *OF_MATRICES) and scene.only_use(left):
            a, b = left.node.inputs[-2:]
            before = addend(left.node)
            k, j = b.type.shape
            known = scene.is_weight(b) and scene.is_weight(right)
            worth = m * k * n + (0 if known else k * j * n) < m * k * j + m * j * n
            if worth and (before is None or (known and scene.is_weight(before) and before.type.rank == 1)):
                inner = making.mm(nodes, b, right)
                inner = scene.constant(inner) if known else inner
                moved = _moved_bias(scene, before, right, bias) if before is not None else bias
                made = making.mm(nodes, a, inner, moved)
                yield Match(root=node, replace={node.value(): made}, what=shape_text(a.type, b.type, right.type))
                continue
        if is_op(right, "mm") and scene.only_use(right):
            b, c = right.node.inputs
            k, j = b.type.shape
            known = scene.is_weight(right)
            if not known and m * k * j + m * j * n < k * j * n + m * k * n:
                first = making.mm(nodes, left, b)
                made = making.mm(nodes, first, c, bias)
                yield Match(root=node, replace={node.value(): made}, what=shape_text(left.type, b.type, c.type))


def _moved_bias(scene: Scene, before: Value, right: Value, bias: Value | None) -> Value:
    nodes = scene.nodes
    row = making.mm(nodes, making.unsqueeze(nodes, before, 0), right)
    moved = making.reshape(nodes, row, right.type.shape[1:])
    if bias is None:
        return scene.constant(moved)
    if scene.is_weight(bias):
        return scene.constant(making.add(nodes, moved, bias))
    return making.add(nodes, scene.constant(moved), bias)


def _common_factor(scene: Scene) -> Iterator[Match]:
    """x A + x B becomes x (A + B), and x A + y A becomes (x + y) A."""
    nodes = scene.nodes
    for node in scene.each("add"):
        pair = operands(node)
        if pair is None or pair[0].type != pair[1].type:
            continue
        shape = pair[0].type.shape
        products = [value.node.inputs[0] if is_op(value, *_VIEW) else value for value in pair]
        if not all(is_op(product, *OF_MATRICES) for product in products) or products[0] == products[1]:
            continue
        if not all(map(scene.only_use, {*pair, *products})):
            continue
        if any(number(p.node, name) not in (None, 1.0) for p in products for name in ("alpha", "beta")):
            continue
        sides = [_linear(scene, product) for product in products]
        if sides[0][0] == sides[1][0] and sides[0][1].type.shape == sides[1][1].type.shape:
            total = _sum_of_weights(scene, sides[0][1], sides[1][1])
            a, b = sides[0][0], total
        elif sides[0][1] == sides[1][1] and sides[0][0].type == sides[1][0].type:
            a, b = making.add(nodes, sides[0][0], sides[1][0]), sides[0][1]
        else:
            continue
        biases = [bias for product in products if (bias := addend(product.node)) is not None]
        if len(biases) == 2 and not all(map(scene.is_weight, biases)):
            continue
        bias = scene.constant(making.add(nodes, *biases)) if len(biases) == 2 else next(iter(biases), None)
        made = making.mm(nodes, a, b, bias)
        made = making.reshape(nodes, made, shape)
        if made.type == node.outputs[0]:
            yield Match(root=node, replace={node.value(): made}, what=shape_text(a.type, b.type))


def _linear(scene: Scene, product: Value) -> tuple[Value, Value]:
    """The tensor and the weight of a product; (x A) B with weights A and B is x (A B)."""
    a, b = product.node.inputs[-2:]
    if is_op(a, "mm") and scene.only_use(a) and scene.is_weight(b) and scene.is_weight(a.node.inputs[1]):
        inner = making.mm(scene.nodes, a.node.inputs[1], b)
        return a.node.inputs[0], scene.constant(inner)
    return a, b


def _sum_of_weights(scene: Scene, a: Value, b: Value) -> Value:
    nodes = scene.nodes
    if not (_steady(scene, a) and _steady(scene, b)):
        return making.add(nodes, a, b)
    if a.node.op == b.node.op == "t":
        return making.t(nodes, scene.constant(making.add(nodes, a.node.inputs[0], b.node.inputs[0])))
    return scene.constant(making.add(nodes, a, b))


def _steady(scene: Scene, value: Value) -> bool:
    """True for a weight, or a new constant computed from weights."""
    return scene.is_weight(value) or str(value.node.attribute("name", "")) in scene.folds.definitions


def _scaled(scene: Scene) -> Iterator[Match]:
    """A numeric factor of a product with a weight moves into the weight."""
    nodes = scene.nodes
    for node in scene.each("mul", "div"):
        scale, value = number(node, "other"), node.inputs[0]
        if scale is None or len(node.inputs) != 1 or not scale or node.attribute("rounding_mode") is not None:
            continue
        product = value.node.inputs[0] if is_op(value, *_VIEW) else value
        if not is_op(product, "mm") or not (scene.only_use(value) and scene.only_use(product)):
            continue
        a, weight = product.node.inputs
        if not scene.is_weight(weight) or scene.is_weight(a):
            continue
        made = making.mm(nodes, a, scene.constant(making.binary(nodes, node.op, weight, scale)))
        made = making.reshape(nodes, made, value.type.shape)
        if made.type == node.outputs[0]:
            yield Match(root=node, replace={node.value(): made}, what=shape_text(a.type, weight.type))


def _joined_rows(scene: Scene) -> Iterator[Match]:
    """Products of all steps of one tensor with the same weight become one product."""
    nodes, found = scene.nodes, dict[tuple[Value, Value, Value | None], dict[int, Node]]()
    for node in scene.each(*OF_MATRICES):
        x, weight = node.inputs[-2:]
        bias = addend(node)
        at = _step_of(x)
        plain = bias is None or (bias.type.rank == 1 and not {"alpha", "beta"} & {name for name, _ in node.attributes})
        if at is not None and plain and scene.is_weight(weight):
            found.setdefault((at[0], weight, bias), {})[at[1]] = node
    for (whole, weight, bias), members in found.items():
        steps, columns = whole.type.shape[0], weight.type.shape[1]
        if len(members) < max(steps, 2) or not is_contiguous(whole.type):
            continue
        rows = making.reshape(nodes, whole, (steps * whole.type.shape[1], whole.type.shape[2]))
        made = making.mm(nodes, rows, weight, bias)
        parts = making.reshape(nodes, made, (steps, whole.type.shape[1], columns))
        replace = {node.value(): making.select(nodes, parts, 0, at) for at, node in members.items()}
        if all(old.type == new.type for old, new in replace.items()):
            what = f"{steps} of {shape_text(members[0].inputs[-2].type, weight.type)}"
            yield Match(root=members[0], replace=replace, what=what)


def _step_of(x: Value) -> tuple[Value, int] | None:
    """The three-dim tensor (step first) from which a matrix is selected, and the number of the step."""
    node = x.node
    if node.op not in ("select", "unbind") or node.inputs[0].type.rank != 3 or node.attribute("dim", 0) != 0:
        return None
    at = x.index if node.op == "unbind" else int(str(node.attribute("index", 0))) % node.inputs[0].type.shape[0]
    return node.inputs[0], at


PASSES: Final = (
    Pass(
        name="conv + batch norm",
        matches="a batch norm by running statistics of a convolution",
        condition="inference; nothing else reads the convolution; weights constant; not transposed, any groups",
        makes="one convolution with scaled weights and another bias",
        source="PyTorch, torch.nn.utils.fusion.fuse_conv_bn_eval",
        find=_conv_norm,
        modes=("inference",),
        reorders=True,
    ),
    Pass(
        name="scale into weight",
        matches="c (x W), through a reshape",
        condition="inference; W constant; nothing else reads the product",
        makes="x (c W)",
        source="distributivity",
        find=_scaled,
        modes=("inference",),
        reorders=True,
    ),
    Pass(
        name="common factor",
        matches="x A + x B, x A + y A, through reshapes and biases",
        condition="nothing else reads the products",
        makes="x (A + B), with A + B computed before the run where both are weights; (x + y) A",
        source="Jia et al., TASO, SOSP 2019: distributivity",
        find=_common_factor,
        reorders=True,
    ),
    Pass(
        name="reassociation",
        matches="(a b) c, a (b c), with biases",
        condition="the other order has fewer operations; b c of weights is computed before the run",
        makes="the other order",
        source="Jia et al., TASO, SOSP 2019: associativity",
        find=_chain,
        reorders=True,
    ),
)

LAST: Final = (
    Pass(
        name="matmul + add",
        matches="a product and a sum with a row or with a tensor of its shape, through a reshape",
        condition="nothing else reads the product; same element type",
        makes="a product that adds in its epilogue",
        source="seed document on graph optimisation; cuBLASLt epilogues",
        find=_bias,
        reorders=True,
    ),
    Pass(
        name="joined rows",
        matches="products of every step of one tensor with the same weight, as a recurrent net has them",
        condition="inference; weight constant; the tensor lies contiguous, its first dim is the step",
        makes="one product of all rows, which reads the weight once, and slices of it",
        source="Appleyard et al., arXiv 1604.01946: input products of all steps at once",
        find=_joined_rows,
        modes=("inference",),
    ),
    Pass(
        name="merged siblings",
        matches="products of one tensor with several weights (Q K V, gate and up), with or without biases",
        condition="inference; weights constant",
        makes="one product with the weights joined, and slices of it",
        source="Jia et al., MetaFlow, SysML 2019; Jia et al., TASO, SOSP 2019",
        find=_siblings,
        modes=("inference",),
    ),
)
