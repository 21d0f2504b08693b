"""Layers recognised in single operators: softmax, layer and RMS norm, GELU, SiLU, attention."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from steptime.captured.graph import Attribute, Node, TensorType, Value
from steptime.captured.graph.strides import wrap
from steptime.captured.ops import making
from steptime.rewrite.scene import Match, Pass, Scene, is_op, last_dim, number, operands, shape_text

DIGITS: Final = 5e-4
"""Relative tolerance of constants: 0.797885 counts as sqrt(2 / pi)."""


def _is_near(given: float | None, expected: float) -> bool:
    return given is not None and abs(given - expected) <= DIGITS * abs(expected)


def _reduced(value: Value, x: Value, *ops: str) -> bool:
    """True if a value is a reduction of ``x`` over its last dim."""
    return is_op(value, *ops) and value.node.inputs[0] == x and last_dim(value.node, x.type)


def _softmax(scene: Scene) -> Iterator[Match]:
    """exp(x - max x) over its sum, with or without the maximum, becomes a softmax."""
    for node in scene.each("div"):
        if len(node.inputs) != 2 or node.attribute("rounding_mode") is not None:
            continue
        above, below = node.inputs
        if not is_op(above, "exp") or not _reduced(below, above, "sum"):
            continue
        x = above.node.inputs[0]
        if is_op(x, "sub") and (pair := operands(x.node)) and _reduced(pair[1], pair[0], "amax", "max"):
            x = pair[0]
        made = making.softmax(scene.nodes, x, -1)
        if made.type == node.outputs[0]:
            yield Match(root=node, replace={node.value(): made}, what=shape_text(x.type))


def _plain(value: Value, op: str) -> Value:
    """The input of an operator ``op`` (a cast), or the value itself if it is another operator."""
    return value.node.inputs[0] if is_op(value, op) else value


def _inverse_root(value: Value) -> tuple[Value, float] | None:
    """The v and eps of 1 / sqrt(v + eps); None for other expressions."""
    node = value.node
    if is_op(value, "rsqrt") or (is_op(value, "pow") and _is_near(number(node, "exponent"), -0.5)):
        inner = node.inputs[0]
    elif is_op(value, "reciprocal") and is_op(node.inputs[0], "sqrt"):
        inner = node.inputs[0].node.inputs[0]
    else:
        return None
    return _shifted(inner)


def _shifted(inner: Value) -> tuple[Value, float] | None:
    eps = number(inner.node, "other") if is_op(inner, "add") and len(inner.node.inputs) == 1 else None
    return (inner.node.inputs[0], eps) if eps is not None else None


def _normed(node: Node) -> tuple[Value, Value, float] | None:
    """The x, v and eps of x / sqrt(v + eps) in any form; None for other expressions."""
    pair = operands(node) if node.op == "mul" else None
    for x, factor in () if pair is None else (pair, pair[::-1]):
        found = _inverse_root(factor)
        if found is not None:
            return x, *found
    if node.op == "div" and len(node.inputs) == 2 and is_op(node.inputs[1], "sqrt"):
        found = _shifted(node.inputs[1].node.inputs[0])
        if found is not None:
            return node.inputs[0], *found
    return None


def _is_square(value: Value, x: Value) -> bool:
    node = value.node
    squared = is_op(value, "pow") and number(node, "exponent") == 2.0 and node.inputs == (x,)
    return squared or (is_op(value, "mul") and node.inputs == (x, x))


def _mean_square(value: Value, x: Value) -> bool:
    return is_op(value, "mean") and last_dim(value.node, x.type) and _is_square(value.node.inputs[0], x)


@dataclass(frozen=True, slots=True)
class _Affine:
    """The affine map after a normalisation: its result, weight and bias."""

    end: Value
    weight: Value | None = None
    bias: Value | None = None


def _affine(scene: Scene, start: Value, width: int, *, with_bias: bool) -> _Affine:
    """Match a cast, a product with a row and a sum with a row whose intermediate values have no other readers."""
    end, weight, bias = start, None, None
    for op in ("_to_copy", "mul", "add") if with_bias else ("_to_copy", "mul"):
        readers = scene.flow.users.get(end, ())
        if not scene.only_use(end) or readers[0].op != op:
            continue
        reader = readers[0]
        if op == "_to_copy":
            end = reader.value()
            continue
        pair = operands(reader)
        row = None if pair is None else pair[1] if pair[0] == end else pair[0]
        if row is None or row.type.shape != (width,) or reader.outputs[0].dtype != end.type.dtype:
            break
        end = reader.value()
        weight, bias = (row, bias) if op == "mul" else (weight, row)
    return _Affine(end, weight, bias)


def _rms_norm(scene: Scene) -> Iterator[Match]:
    for node in scene.each("mul", "div"):
        found = _normed(node)
        if found is None or not _mean_square(found[1], found[0]):
            continue
        x, eps = found[0], found[2]
        after = _affine(scene, node.value(), x.type.shape[-1], with_bias=False)
        source = _plain(x, "_to_copy")
        source = source if source.type.dtype == after.end.type.dtype else x
        if source.type.dtype != after.end.type.dtype:
            continue
        weight = None if after.weight is None else making.to(scene.nodes, after.weight, source.type.dtype)
        made = making.rms_norm(scene.nodes, source, weight, source.type.shape[-1:], eps)
        if made.type == after.end.type:
            yield Match(root=node, replace={after.end: made}, what=shape_text(source.type))


def _layer_norm(scene: Scene) -> Iterator[Match]:
    for node in scene.each("mul", "div"):
        found = _normed(node)
        if found is None or not is_op(found[0], "sub"):
            continue
        centred, variance, eps = found
        pair = operands(centred.node)
        if pair is None or not _reduced(pair[1], pair[0], "mean"):
            continue
        x = pair[0]
        biased = variance.node.attribute("unbiased") is False or number(variance.node, "correction") == 0.0
        own = _reduced(variance, x, "var") and biased
        if not (own or _mean_square(variance, centred)):
            continue
        after = _affine(scene, node.value(), x.type.shape[-1], with_bias=True)
        source = _plain(x, "_to_copy")
        source = source if source.type.dtype == after.end.type.dtype else x
        rows = [row for row in (after.weight, after.bias) if row is not None]
        if source.type.dtype != after.end.type.dtype or any(row.type.dtype != source.type.dtype for row in rows):
            continue
        width = source.type.shape[-1:]
        inputs = {"input": source, "weight": after.weight, "bias": after.bias}
        normed: dict[str, Attribute] = {"normalized_shape": width, "eps": eps}
        made = making.made(scene.nodes, "native_layer_norm", inputs, normed).value()
        if made.type == after.end.type:
            yield Match(root=node, replace={after.end: made}, what=shape_text(source.type))


def _factors(value: Value, depth: int = 4) -> tuple[list[Value], float]:
    """The tensors and the numeric factor of a product."""
    node = value.node
    if depth and is_op(value, "mul", "div"):
        scale = number(node, "other")
        if scale is not None and len(node.inputs) == 1 and scale and node.attribute("rounding_mode") is None:
            inner, factor = _factors(node.inputs[0], depth - 1)
            return inner, factor * scale if node.op == "mul" else factor / scale
        pair = operands(node) if node.op == "mul" else None
        if pair is not None:
            parts = [_factors(each, depth - 1) for each in pair]
            return parts[0][0] + parts[1][0], parts[0][1] * parts[1][1]
    return [value], 1.0


def _inside(value: Value, op: str) -> Value | None:
    """The t of 1 + op(t); None for other expressions."""
    node = value.node
    if is_op(value, "add") and len(node.inputs) == 1 and number(node, "other") == 1.0 and is_op(node.inputs[0], op):
        return node.inputs[0].node.inputs[0]
    return None


def _is_cubic(value: Value, x: Value) -> bool:
    """True if a value is x + 0.044715 x^3."""
    pair = operands(value.node) if is_op(value, "add") else None
    for first, second in () if pair is None else (pair, pair[::-1]):
        tensors, scale = _factors(second)
        power = len(tensors) == 1 and is_op(tensors[0], "pow") and number(tensors[0].node, "exponent") == 3.0
        cube = (power and tensors[0].node.inputs == (x,)) or tensors == [x, x, x]
        if first == x and cube and _is_near(scale, 0.044715):
            return True
    return False


def _gelu(scene: Scene) -> Iterator[Match]:
    """x / 2 (1 + erf(x / sqrt 2)), or its tanh form, in any order of factors, becomes a GELU."""
    for node in scene.each("mul"):
        tensors, scale = _factors(node.value())
        if len(tensors) != 2 or not _is_near(scale, 0.5):
            continue
        for x, other in (tensors, tensors[::-1]):
            erf, tanh = _inside(other, "erf"), _inside(other, "tanh")
            if erf is not None and _is_scaled(erf, x, math.sqrt(0.5)):
                made = making.unary(scene.nodes, "gelu", x)
            elif tanh is not None and _is_tanh_form(tanh, x):
                made = making.unary(scene.nodes, "gelu", x, approximate="tanh")
            else:
                continue
            if made.type == node.outputs[0]:
                yield Match(root=node, replace={node.value(): made}, what=shape_text(x.type))
            break


def _is_scaled(value: Value, x: Value, factor: float) -> bool:
    tensors, scale = _factors(value)
    return tensors == [x] and _is_near(scale, factor)


def _is_tanh_form(value: Value, x: Value) -> bool:
    tensors, scale = _factors(value)
    return len(tensors) == 1 and _is_near(scale, math.sqrt(2 / math.pi)) and _is_cubic(tensors[0], x)


def _silu(scene: Scene) -> Iterator[Match]:
    for node in scene.each("mul"):
        pair = operands(node)
        for x, gate in () if pair is None else (pair, pair[::-1]):
            if is_op(gate, "sigmoid") and gate.node.inputs[0] == x and node.outputs[0] == x.type:
                made = making.unary(scene.nodes, "silu", x)
                yield Match(root=node, replace={node.value(): made}, what=shape_text(x.type))
                break


_SAME_ORDER: Final = ("view", "_unsafe_view", "expand", "clone", "detach", "alias")


def _by_head(scene: Scene, value: Value) -> Value:
    """An operand of a batched product as (batch, heads, rows, columns)."""
    batch, tail = value.type.shape[0], value.type.shape[1:]
    seen = value
    while True:
        shape = seen.type.shape
        if len(shape) == 4 and shape[0] * shape[1] == batch and shape[2:] == tail:
            return _before_copies(seen)
        node = seen.node
        if seen.index or node.op not in _SAME_ORDER or node.inputs[0].type.elements != seen.type.elements:
            return making.unsqueeze(scene.nodes, value, 0)
        seen = node.inputs[0]


def _before_copies(value: Value) -> Value:
    """The value before copies and expansions to the same shape, as fused attention reads any strides."""
    while value.node.op in ("clone", "expand") and value.node.inputs[0].type.shape == value.type.shape:
        value = value.node.inputs[0]
    return value


@dataclass(frozen=True, slots=True)
class _Scores:
    """The argument of a softmax: a batched product, its scale, and an added mask."""

    product: Node
    scale: float
    mask: Value | None


def _scores(value: Value, depth: int = 8) -> _Scores | None:
    """Match a product, then a scale, then a mask; a scale after the mask is refused, as it would scale the mask."""
    node = value.node
    if not depth or value.index:
        return None
    if node.op == "bmm":
        return _Scores(node, 1.0, None)
    if node.op in (*_SAME_ORDER, "_to_copy") and node.inputs[0].type.elements == value.type.elements:
        return _scores(node.inputs[0], depth - 1)
    given = number(node, "other")
    if node.op in ("mul", "div") and len(node.inputs) == 1 and given and node.attribute("rounding_mode") is None:
        found = _scores(node.inputs[0], depth - 1)
        factor = given if node.op == "mul" else 1.0 / given
        return None if found is None or found.mask is not None else replace(found, scale=found.scale * factor)
    pair = operands(node) if node.op == "add" else None
    for inner, added in () if pair is None else (pair, pair[::-1]):
        found = _scores(inner, depth - 1) if inner.type.shape == value.type.shape else None
        if found is not None and found.mask is None:
            return replace(found, mask=added)
    return None


def _attention(scene: Scene) -> Iterator[Match]:
    """softmax(q k^T c + mask) v in batched products, with reshapes of ``matmul`` around them, becomes one operator."""
    nodes = scene.nodes
    for node in scene.each("bmm"):
        weights, value = node.inputs
        soft = weights
        while soft.node.op in (*_SAME_ORDER, "_to_copy") and not soft.index:
            soft = soft.node.inputs[0]
        if not is_op(soft, "_softmax") or soft.type.elements != weights.type.elements:
            continue
        if wrap(int(str(soft.node.attribute("dim", -1))), soft.type.rank) != soft.type.rank - 1:
            continue
        found = _scores(soft.node.inputs[0])
        if found is None or found.product.outputs[0].shape != weights.type.shape:
            continue
        q, turned, v = (_by_head(scene, each) for each in (*found.product.inputs, value))
        if (
            q is None
            or turned is None
            or v is None
            or not q.type.shape[:2] == turned.type.shape[:2] == v.type.shape[:2]
        ):
            continue
        b, h, rows, width = q.type.shape
        if v.type.shape[3] != width or not _fits(found.mask, (b, h, rows, turned.type.shape[3])):
            continue
        mask = found.mask
        while mask is not None and mask.type.rank < 4:
            mask = making.unsqueeze(nodes, mask, 0)
        if mask is not None and mask.type.dtype != q.type.dtype:
            mask = making.to(nodes, mask, q.type.dtype)
        k = making.transpose(nodes, turned, 2, 3)
        made = making.attention(nodes, q, k, v, mask, causal=False, scale=found.scale)
        what = shape_text(q.type, TensorType(k.type.shape, "fp32"))
        yield Match(root=node, replace=_in_place_of(scene, node, made), what=what)


def _in_place_of(scene: Scene, node: Node, made: Value) -> dict[Value, Value]:
    """Replacement for a result by heads: of the reshape to heads if it is the product's only reader, else of both."""
    readers = scene.flow.users.get(node.value(), ())
    if len(readers) == 1 and readers[0].op in ("view", "_unsafe_view") and scene.only_use(node.value()):
        shown = readers[0].value()
        if shown.type.shape == made.type.shape:
            return {shown: made}
    return {node.value(): making.reshape(scene.nodes, made, node.outputs[0].shape)}


def _fits(mask: Value | None, scores: tuple[int, ...]) -> bool:
    if mask is None:
        return True
    padded = (1,) * (4 - mask.type.rank) + mask.type.shape
    return mask.type.rank <= 4 and all(have in (1, want) for have, want in zip(padded, scores, strict=True))


PASSES: Final = (
    Pass(
        name="softmax",
        matches="exp(x - max x) / sum, with or without the maximum",
        condition="over the last dim, which is kept",
        makes="one softmax",
        source="definition",
        find=_softmax,
        reorders=True,
    ),
    Pass(
        name="layer norm",
        matches="(x - mean) / sqrt(var + eps), times a row, plus a row, with casts around",
        condition="over the last dim; the variance is the biased one; rows have the width; nothing else reads between",
        makes="one layer norm",
        source="Ba et al., arXiv 1607.06450",
        find=_layer_norm,
        reorders=True,
    ),
    Pass(
        name="RMS norm",
        matches="x / sqrt(mean x^2 + eps), times a row, with casts around",
        condition="over the last dim; the row has the width; CUDA, whose kernel is fused",
        makes="one RMS norm",
        source="Zhang and Sennrich, arXiv 1910.07467",
        find=_rms_norm,
        reorders=True,
        only_cuda=True,
    ),
    Pass(
        name="GELU",
        matches="x / 2 (1 + erf(x / sqrt 2)), x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))",
        condition="numbers agree to 5e-4; the product in any order",
        makes="one GELU",
        source="Hendrycks and Gimpel, arXiv 1606.08415",
        find=_gelu,
        reorders=True,
    ),
    Pass(
        name="SiLU",
        matches="x sigmoid(x)",
        condition="same shape and type",
        makes="one SiLU",
        source="Hendrycks and Gimpel, arXiv 1606.08415",
        find=_silu,
        reorders=True,
    ),
    Pass(
        name="attention",
        matches="softmax(c q k^T + mask) v in batched products",
        condition="softmax over the keys; a mask that is added and broadcasts; heads of one width; no dropout",
        makes="one fused attention, which writes no scores",
        source="Dao et al., arXiv 2205.14135",
        find=_attention,
        reorders=True,
    ),
)
