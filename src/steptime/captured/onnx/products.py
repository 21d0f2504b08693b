"""Rows of matrix products, attention, rotary embeddings, and recurrent layers.

An LSTM in fp32 runs as PyTorch's layer; other recurrent layers are unrolled over time, as PyTorch runs them without a
fused kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn import functional as F

from steptime.captured.onnx.call import OnnxCall, Result, row

Pair = tuple[torch.Tensor, torch.Tensor]
Linear = Callable[[torch.Tensor], torch.Tensor]


@row("MatMul")
def _matmul(call: OnnxCall) -> Result:
    return torch.matmul(call.weight(0), call.weight(1))


@row("FusedMatMul", domain="com.microsoft")
def _fused_matmul(call: OnnxCall) -> Result:
    if call.get("transBatchA") or call.get("transBatchB"):
        return None
    a, b, alpha = call.weight(0), call.weight(1), float(call.get("alpha", 1.0))
    product = torch.matmul(a.mT if call.get("transA") else a, b.mT if call.get("transB") else b)
    return product if alpha == 1 else product * alpha


@row("Gemm")
def _gemm(call: OnnxCall) -> Result:
    a, b = call.weight(0), call.weight(1)
    a, b = a.t() if call.get("transA") else a, b.t() if call.get("transB") else b
    alpha, beta = float(call.get("alpha", 1.0)), float(call.get("beta", 1.0))
    if call.has(2) and beta:
        return torch.addmm(call.weight(2), a, b, alpha=alpha, beta=beta)
    product = torch.mm(a, b)
    return product if alpha == 1 else product * alpha


@row("Einsum")
def _einsum(call: OnnxCall) -> Result:
    return torch.einsum(str(call.get("equation", "")), *(call.weight(n) for n in range(len(call.inputs))))


_KNOWN = {"is_causal", "kv_num_heads", "q_num_heads", "qk_matmul_output_mode", "scale", "softcap", "softmax_precision"}


@row("Attention")
def _attention(call: OnnxCall) -> Result:
    """Attention, fused if PyTorch has a kernel; None (opaque) with output scores, input 6 or an unknown attribute."""
    if call.has(6) or any(call.outputs[3:]) or set(call.attributes) - _KNOWN:
        return None
    counts, flat = [int(call.get(name, 0)) for name in ("q_num_heads", "kv_num_heads")], call.x().dim() == 3
    query, key, value = (_heads(call.x(n), counts[n > 0]) if flat else call.x(n) for n in range(3))
    if call.has(4) and call.has(5):
        key, value = torch.cat([call.x(4), key], 2), torch.cat([call.x(5), value], 2)
    past = call.tensor(4).shape[2] if call.has(4) else 0
    made = _attended(call, query, (key, value), past)
    return made.transpose(1, 2).flatten(2) if flat else made, key, value


def _attended(call: OnnxCall, query: torch.Tensor, pair: Pair, past: int) -> torch.Tensor:
    """Attention of a query; if causal, query i sees the keys up to ``past + i``."""
    key, value = pair
    causal, cap = bool(call.get("is_causal", 0)), float(call.get("softcap", 0.0) or 0.0)
    (_, heads, length, width), (_, kv_heads, keys, _) = query.shape, key.shape
    scale, mask = call.get("scale"), _mask(call, query, keys)
    shared = heads != kv_heads
    if value.shape[3] == width and not cap and not (causal and (mask is not None or past)):
        return F.scaled_dot_product_attention(query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=shared)
    if shared:
        key, value = (part.repeat_interleave(heads // kv_heads, 1) for part in (key, value))
    scores = query * (1.0 / math.sqrt(width) if scale is None else scale) @ key.transpose(2, 3)
    scores = torch.tanh(scores / cap) * cap if cap else scores
    if causal:
        seen = torch.ones((length, keys), dtype=torch.bool).tril(past)
        scores = scores + _additive(seen, query.dtype)
    return torch.softmax(scores if mask is None else scores + mask, -1) @ value


def _mask(call: OnnxCall, query: torch.Tensor, keys: int) -> torch.Tensor | None:
    """Additive mask with four dims; a mask that is too short is padded with minus infinity."""
    mask = call.maybe(3)
    if mask is None:
        return None
    mask = _additive(mask, query.dtype) if mask.dtype is torch.bool else mask
    missing = keys - mask.shape[-1]
    if missing > 0 and mask.shape[-1] != 1:
        mask = torch.constant_pad_nd(mask, (0, missing), float("-inf"))
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    return mask


def _additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask: zero where ``seen`` is true, minus infinity elsewhere."""
    return torch.where(seen, torch.zeros((), dtype=dtype), torch.full((), float("-inf"), dtype=dtype))


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Reshape (batch, sequence, heads x size) to (batch, heads, sequence, size)."""
    b, s, width = x.shape
    if heads < 1 or width % heads:
        raise ValueError(f"a width of {width} cannot be cut into {heads} heads")
    return x.reshape(b, s, heads, width // heads).transpose(1, 2)


@row("RotaryEmbedding")
def _rotary(call: OnnxCall) -> Result:
    """Rotate halves (interleaved: pairs) of each head by an angle that depends on the position."""
    x, pairs, flat = call.x(), bool(call.get("interleaved")), call.x().dim() == 3
    x = _heads(x, int(call.get("num_heads", 0))) if flat else x
    turned = int(call.get("rotary_embedding_dim", 0)) or x.shape[3]
    tables = [call.x(1), call.x(2)]
    if call.has(3):
        tables = [F.embedding(call.x(3), table) for table in tables]
    cosine, sine = (table.unsqueeze(1) for table in tables)
    body = x.narrow(3, 0, turned)
    first, second = (body[..., n::2] for n in (0, 1)) if pairs else body.chunk(2, 3)
    halves = [cosine * first - sine * second, sine * first + cosine * second]
    made = torch.stack(halves, 4).flatten(3) if pairs else torch.cat(halves, 3)
    if turned < x.shape[3]:
        made = torch.cat([made, x.narrow(3, turned, x.shape[3] - turned)], 3)
    return made.transpose(1, 2).flatten(2) if flat else made


MAX_STEPS = 20_000
"""Longest sequence that is unrolled; a recurrent layer over a longer one stays opaque, except an LSTM in fp32."""

#: Operator -> its default activations, the only ones that are supported.
_ACTIVATIONS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}


@row("LSTM", "GRU", "RNN")
def _recurrent(call: OnnxCall) -> Result:
    """A recurrent layer, each direction by itself; inputs are (sequence, batch, features), or batch first."""
    direction, batch_first = call.get("direction", "forward"), bool(call.get("layout"))
    count = 2 if direction == "bidirectional" else 1
    asked = tuple(str(name) for name in call.get("activations") or _ACTIVATIONS[call.op] * count)
    plain = asked == _ACTIVATIONS[call.op] * count and not call.get("clip") and not call.get("input_forget")
    fused = call.op == "LSTM" and call.tensor(0).dtype == "fp32"
    if not plain or call.has(4) or call.has(7) or (call.tensor(0).shape[int(batch_first)] > MAX_STEPS and not fused):
        return None
    x = call.x().transpose(0, 1) if batch_first else call.x()
    if fused:
        return _lstm(call, x, count, batch_first)
    found = [_direction(call, x, n, direction == "reverse" or n == 1) for n in range(count)]
    joined = torch.stack([outputs for outputs, _, _ in found], 1)
    lasts = [torch.stack(last, 0) for last in list(zip(*found, strict=True))[1 : 3 if call.op == "LSTM" else 2]]
    if batch_first:
        joined, lasts = joined.permute(2, 0, 1, 3), [last.transpose(0, 1) for last in lasts]
    return joined, *lasts


def _lstm(call: OnnxCall, x: torch.Tensor, count: int, batch_first: bool) -> Result:
    """An LSTM by PyTorch's layer, whose weights have the gates in the order input, forget, cell, output."""
    reverse = call.get("direction") == "reverse"
    x = x.flip((0,)) if reverse else x
    (steps, batch, _), hidden = x.shape, call.tensor(2).shape[2]
    states = [call.x(n) if call.has(n) else torch.zeros((count, batch, hidden), dtype=x.dtype) for n in (5, 6)]
    states = [each.transpose(0, 1) if batch_first and call.has(n) else each for n, each in enumerate(states, 5)]
    weights = []
    for n in range(count):
        given = [call.weight(1).select(0, n), call.weight(2).select(0, n)]
        given += call.weight(3).select(0, n).chunk(2, 0) if call.has(3) else ()
        cut = [each.split_with_sizes((hidden, hidden, 2 * hidden), 0) for each in given]
        weights += [torch.cat([i, forget_and_cell, o], 0) for i, o, forget_and_cell in cut]
    training = torch.is_grad_enabled()
    joined, *lasts = torch.lstm(x, states, weights, call.has(3), 1, 0.0, training, count == 2, False)
    joined = (joined.flip((0,)) if reverse else joined).reshape(steps, batch, count, hidden)
    if batch_first:
        return joined.transpose(0, 1), *(last.transpose(0, 1) for last in lasts)
    return joined.transpose(1, 2), *lasts


def _direction(call: OnnxCall, x: torch.Tensor, number: int, reverse: bool) -> tuple[torch.Tensor, ...]:
    """One direction of a recurrent layer: the input product of all steps, then one product with the state per step."""
    weight, recurrence = (call.weight(n).select(0, number) for n in (1, 2))
    (steps, batch, _), (width, hidden) = x.shape, recurrence.shape
    biases = call.weight(3).select(0, number).chunk(2, 0) if call.has(3) else (None, None)
    projected = F.linear(x.flatten(0, 1), weight, biases[0]).reshape(steps, batch, width)
    dim, linear_before_reset = 1 if call.get("layout") else 0, bool(call.get("linear_before_reset"))
    state, cell = (
        call.x(n).select(dim, number) if call.has(n) else torch.zeros((batch, hidden), dtype=x.dtype) for n in (5, 6)
    )
    parts: list[tuple[torch.Tensor, torch.Tensor | None]] = [(recurrence, biases[1])]
    if call.op == "GRU" and not linear_before_reset:
        cuts = (2 * hidden, hidden)
        more = (None, None) if biases[1] is None else biases[1].split_with_sizes(cuts, 0)
        parts = [*zip(recurrence.split_with_sizes(cuts, 0), more, strict=True)]
    linear = [partial(_linear, matrix.t(), bias) for matrix, bias in parts]
    outputs: list[torch.Tensor] = []
    for step in range(steps - 1, -1, -1) if reverse else range(steps):
        given = projected.select(0, step)
        if call.op == "GRU":
            state = _gru_cell(given, state, linear)
        elif call.op == "LSTM":
            i, o, f, g = (given + linear[0](state)).chunk(4, 1)
            cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
            state = torch.sigmoid(o) * torch.tanh(cell)
        else:
            state = torch.tanh(given + linear[0](state))
        outputs.append(state)
    return torch.stack(outputs[::-1] if reverse else outputs, 0), state, cell


def _linear(matrix: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, matrix) if bias is None else torch.addmm(bias, x, matrix)


def _gru_cell(given: torch.Tensor, state: torch.Tensor, linear: Sequence[Linear]) -> torch.Tensor:
    """New state of a GRU; gates in the order update, reset, hidden; two products if the reset precedes the last one."""
    update, reset, new = given.chunk(3, 1)
    z, r, *h = linear[0](state).chunk(4 - len(linear), 1)
    z, r = torch.sigmoid(update + z), torch.sigmoid(reset + r)
    candidate = torch.tanh(new + (r * h[0] if h else linear[1](r * state)))
    return candidate + z * (state - candidate)
