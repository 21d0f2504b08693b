"""Rows of attention and of rotary positions."""

from __future__ import annotations

import math

from steptime.captured.aten import layers, maths, views
from steptime.captured.graph.node import Nodes, Value
from steptime.captured.onnx.call import OnnxCall, Result, row
from steptime.captured.onnx.products import matmul
from steptime.captured.onnx.shapes import pad


@row("Attention")
def _attention(call: OnnxCall) -> Result:
    """The fused kernel where PyTorch would take it, else products and softmax; scores as an output are opaque."""
    nodes, flat = call.nodes, call.type().rank == 3
    if call.has(6) or any(call.outputs[3:]) or set(call.attributes) - _KNOWN:
        return None
    heads, kv_heads = int(call.get("q_num_heads", 0)), int(call.get("kv_num_heads", 0))
    query, key, value = (
        _heads(nodes, call.value(n), heads if n == 0 else kv_heads) if flat else call.value(n) for n in range(3)
    )
    if call.has(4) and call.has(5):
        key = views.cat(nodes, [call.value(4), key], 2)
        value = views.cat(nodes, [call.value(5), value], 2)
    past = call.type(4).shape[2] if call.has(4) else 0
    made = _scores_and_values(call, (query, key, value), past)
    if flat:
        b, h, s, d = made.type.shape
        made = views.reshape(nodes, views.transpose(nodes, made, 1, 2), (b, s, h * d))
    return (made, key, value)


def _scores_and_values(call: OnnxCall, inputs: tuple[Value, Value, Value], past: int) -> Value:
    """Causal: query i sees the keys up to ``past + i``."""
    query, key, value = inputs
    nodes, causal, cap = call.nodes, bool(call.get("is_causal", 0)), float(call.get("softcap", 0.0) or 0.0)
    (_, heads, length, width), (_, kv_heads, keys, _) = query.type.shape, key.type.shape
    given = call.get("scale")
    scale = 1.0 / math.sqrt(width) if given is None else float(given)
    mask = _mask(call, query, keys)
    same = heads == kv_heads and value.type.shape[3] == width
    if same and not cap and not (causal and (mask is not None or past)):
        return layers.attention(nodes, query, key, value, mask, causal=causal, scale=None if given is None else scale)
    if heads != kv_heads:
        key, value = (_repeated(nodes, part, heads // kv_heads) for part in (key, value))
    scores = matmul(nodes, maths.mul(nodes, query, scale), views.transpose(nodes, key, 2, 3))
    if cap:
        scores = maths.mul(nodes, maths.unary(nodes, "tanh", maths.div(nodes, scores, cap)), cap)
    if causal:
        ones = maths.full(nodes, (length, keys), 1, "bool")
        seen = nodes.apply("tril", {"self": ones}, {"diagonal": past}, outputs=[ones.type]).value()
        scores = maths.add(nodes, scores, _additive(nodes, seen, query.type.dtype))
    if mask is not None:
        scores = maths.add(nodes, scores, mask)
    return matmul(nodes, layers.softmax(nodes, scores, -1), value)


def _mask(call: OnnxCall, query: Value, keys: int) -> Value | None:
    """The mask as numbers to add, over four dims; short ones are filled with what is not seen."""
    mask = call.maybe(3)
    if mask is None:
        return None
    nodes = call.nodes
    if mask.type.dtype == "bool":
        mask = _additive(nodes, mask, query.type.dtype)
    missing = keys - mask.type.shape[-1]
    if missing > 0 and mask.type.shape[-1] != 1:
        mask = pad(nodes, mask, [0] * mask.type.rank, [0] * (mask.type.rank - 1) + [missing], float("-inf"))
    while mask.type.rank < 4:
        mask = views.unsqueeze(nodes, mask, 0)
    return mask


def _additive(nodes: Nodes, seen: Value, dtype: str) -> Value:
    """Zero where something is seen, minus infinity elsewhere."""
    return maths.where(nodes, seen, maths.full(nodes, (), 0, dtype), maths.full(nodes, (), float("-inf"), dtype))


def _repeated(nodes: Nodes, x: Value, times: int) -> Value:
    """Each key head once per query head that reads it."""
    b, h, s, d = x.type.shape
    shown = views.expand(nodes, views.unsqueeze(nodes, x, 2), (b, h, times, s, d))
    return views.reshape(nodes, shown, (b, h * times, s, d))


_KNOWN = {"is_causal", "kv_num_heads", "q_num_heads", "qk_matmul_output_mode", "scale", "softcap", "softmax_precision"}


def _heads(nodes: Nodes, x: Value, heads: int) -> Value:
    """(batch, sequence, heads x size) as (batch, heads, sequence, size)."""
    b, s, width = x.type.shape
    if heads < 1 or width % heads:
        raise ValueError(f"a width of {width} cannot be cut into {heads} heads")
    return views.transpose(nodes, views.reshape(nodes, x, (b, s, heads, width // heads)), 1, 2)


@row("RotaryEmbedding")
def _rotary(call: OnnxCall) -> Result:
    """Halves (or, interleaved, pairs) of each head turned by an angle that depends on the position."""
    nodes, x, flat = call.nodes, call.value(), call.type().rank == 3
    if flat:
        x = _heads(nodes, x, int(call.get("num_heads", 0)))
    b, h, s, width = x.type.shape
    turned = int(call.get("rotary_embedding_dim", 0)) or width
    cosine, sine = call.value(1), call.value(2)
    if call.has(3):
        positions = call.value(3)
        cosine, sine = (layers.embedding(nodes, table, positions) for table in (cosine, sine))
    cosine, sine = (views.unsqueeze(nodes, table, 1) for table in (cosine, sine))
    body = views.slice(nodes, x, 3, 0, turned)
    if call.get("interleaved"):
        first, second = (views.slice(nodes, body, 3, n, turned, 2) for n in (0, 1))
    else:
        first, second = views.split_with_sizes(nodes, body, (turned // 2, turned // 2), 3)
    real = maths.sub(nodes, maths.mul(nodes, cosine, first), maths.mul(nodes, sine, second))
    imaginary = maths.add(nodes, maths.mul(nodes, sine, first), maths.mul(nodes, cosine, second))
    if call.get("interleaved"):
        made = views.reshape(nodes, views.stack(nodes, [real, imaginary], 4), (b, h, s, turned))
    else:
        made = views.cat(nodes, [real, imaginary], 3)
    if turned < width:
        made = views.cat(nodes, [made, views.slice(nodes, x, 3, turned, width)], 3)
    if flat:
        made = views.reshape(nodes, views.transpose(nodes, made, 1, 2), (b, s, math.prod((h, width))))
    return made
