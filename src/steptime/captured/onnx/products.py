"""Rows of matrix products, attention with rotary positions, and recurrent layers.

Recurrent layers are unrolled over time, as PyTorch runs them without a fused kernel.
"""

from __future__ import annotations

import math

from steptime.captured.aten import layers, maths, views
from steptime.captured.graph.program import Nodes, Value
from steptime.captured.onnx.call import OnnxCall, Result, row
from steptime.captured.onnx.shapes import pad


def matmul(nodes: Nodes, a: Value, b: Value) -> Value:
    """``a @ b`` as PyTorch runs it: one ``mm`` where ``b`` is a matrix, else ``bmm`` over the broadcast batch."""
    if a.type.rank == 0 or b.type.rank == 0:
        raise ValueError("a product takes no scalars")
    if a.type.rank == b.type.rank == 1:
        return maths.dot(nodes, a, b)
    if a.type.rank == 1:
        return views.squeeze(nodes, matmul(nodes, views.unsqueeze(nodes, a, 0), b), (-2,))
    if b.type.rank == 1:
        return views.squeeze(nodes, matmul(nodes, a, views.unsqueeze(nodes, b, 1)), (-1,))
    if b.type.rank == 2:
        rows = a if a.type.rank == 2 else views.reshape(nodes, a, (math.prod(a.type.shape[:-1]), a.type.shape[-1]))
        product = maths.mm(nodes, rows, b)
        return views.reshape(nodes, product, (*a.type.shape[:-1], b.type.shape[-1]))
    batch = maths.broadcast(a.type.shape[:-2], b.type.shape[:-2])
    parts = []
    for part in (a, b):
        whole = views.expand(nodes, part, (*batch, *part.type.shape[-2:]))
        parts.append(views.reshape(nodes, whole, (math.prod(batch), *part.type.shape[-2:])))
    product = maths.bmm(nodes, parts[0], parts[1])
    return views.reshape(nodes, product, (*batch, *product.type.shape[-2:]))


@row("MatMul")
def _matmul(call: OnnxCall) -> Result:
    return matmul(call.nodes, call.weight(0), call.weight(1))


@row("FusedMatMul", domain="com.microsoft")
def _fused_matmul(call: OnnxCall) -> Result:
    if call.get("transBatchA") or call.get("transBatchB"):
        return None
    a, b = call.weight(0), call.weight(1)
    a = views.transpose(call.nodes, a, -2, -1) if call.get("transA") else a
    b = views.transpose(call.nodes, b, -2, -1) if call.get("transB") else b
    product = matmul(call.nodes, a, b)
    alpha = float(call.get("alpha", 1.0))
    return product if alpha == 1 else maths.mul(call.nodes, product, alpha)


@row("Gemm")
def _gemm(call: OnnxCall) -> Result:
    nodes, a, b = call.nodes, call.weight(0), call.weight(1)
    a = views.t(nodes, a) if call.get("transA") else a
    b = views.t(nodes, b) if call.get("transB") else b
    alpha, beta = float(call.get("alpha", 1.0)), float(call.get("beta", 1.0))
    bias = call.maybe_weight(2)
    if bias is not None and beta:
        return maths.addmm(nodes, bias, a, b, beta, alpha)
    product = maths.mm(nodes, a, b)
    return product if alpha == 1 else maths.mul(nodes, product, alpha)


@row("Einsum")
def _einsum(call: OnnxCall) -> Result:
    """Products of two tensors without repeated letters in one of them; the rest stays opaque."""
    equation = str(call.get("equation", "")).replace(" ", "")
    given, arrow, wanted = equation.partition("->")
    terms = given.split(",")
    letters = "".join(terms)
    if not letters.isalpha() or len(terms) != len(call.inputs):
        return None
    if not arrow:
        wanted = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    if len(set(wanted)) != len(wanted) or not set(wanted) <= set(letters):
        return None
    ranks = [value.type.rank for value in call.values()]
    if any(len(set(term)) != len(term) or len(term) != rank for term, rank in zip(terms, ranks, strict=True)):
        return None
    if len(terms) == 1:
        return _arrange(call.nodes, call.value(), terms[0], wanted)
    if len(terms) != 2:
        return None
    return _einsum_of_two(call.nodes, call.weight(0), call.weight(1), (terms[0], terms[1]), wanted)


def _arrange(nodes: Nodes, x: Value, have: str, wanted: str) -> Value:
    """Sum over the letters that are not wanted, then order the rest."""
    gone = tuple(n for n, letter in enumerate(have) if letter not in wanted)
    if gone:
        x = maths.reduce(nodes, "sum", x, gone, False)
    kept = [letter for letter in have if letter in wanted]
    return views.permute(nodes, x, [kept.index(letter) for letter in wanted])


def _einsum_of_two(nodes: Nodes, a: Value, b: Value, terms: tuple[str, str], wanted: str) -> Value:
    """Permute both to (batch, rows, inner) and (batch, inner, columns), one ``bmm``, then the order that is wanted."""
    left, right = terms
    sizes = dict(zip(right, b.type.shape, strict=True)) | dict(zip(left, a.type.shape, strict=True))
    batch = [x for x in wanted if x in left and x in right]
    rows = [x for x in wanted if x in left and x not in right]
    columns = [x for x in wanted if x in right and x not in left]
    inner = [x for x in left if x in right and x not in wanted]
    a = _arrange(nodes, a, left, "".join(batch + rows + inner))
    b = _arrange(nodes, b, right, "".join(batch + inner + columns))
    count = [math.prod(sizes[x] for x in group) for group in (batch, rows, inner, columns)]
    product = maths.bmm(
        nodes,
        views.reshape(nodes, a, (count[0], count[1], count[2])),
        views.reshape(nodes, b, (count[0], count[2], count[3])),
    )
    order = batch + rows + columns
    product = views.reshape(nodes, product, [sizes[x] for x in order])
    return views.permute(nodes, product, [order.index(x) for x in wanted])


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


MAX_STEPS = 20_000
"""Longest sequence that is unrolled; a longer one stays one opaque operator."""

#: Default activations, and the only ones that have a row.
_ACTIVATIONS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}


@row("LSTM", "GRU", "RNN")
def _recurrent(call: OnnxCall) -> Result:
    """Each direction by itself; inputs are (sequence, batch, features), or batch first with ``layout``."""
    nodes, x, op = call.nodes, call.value(), call.op
    direction = call.get("direction", "forward")
    count = 2 if direction == "bidirectional" else 1
    asked = tuple(str(name) for name in call.get("activations") or _ACTIVATIONS[op] * count)
    steps = x.type.shape[1 if call.get("layout") else 0]
    plain = asked == _ACTIVATIONS[op] * count and not call.get("clip") and not call.get("input_forget")
    if not plain or call.has(4) or call.has(7) or steps > MAX_STEPS:
        return None
    if call.get("layout"):
        x = views.transpose(nodes, x, 0, 1)
    outputs, lasts, cells = [], [], []
    for number in range(count):
        backward = direction == "reverse" or number == 1
        sequence, last, cell = _direction(call, x, number, backward)
        outputs.append(sequence)
        lasts.append(last)
        cells.append(cell)
    joined = views.stack(nodes, outputs, 1)
    last = views.stack(nodes, lasts, 0)
    final = views.stack(nodes, [cell for cell in cells if cell is not None], 0) if op == "LSTM" else None
    if call.get("layout"):
        joined = views.permute(nodes, joined, (2, 0, 1, 3))
        last = views.transpose(nodes, last, 0, 1)
        final = None if final is None else views.transpose(nodes, final, 0, 1)
    return (joined, last) if final is None else (joined, last, final)


def _direction(call: OnnxCall, x: Value, number: int, backward: bool) -> tuple[Value, Value, Value | None]:
    """One direction: the input product of all steps at once, then one product with the state per step."""
    nodes = call.nodes
    weight, recurrence = (views.select(nodes, call.weight(n), 0, number) for n in (1, 2))
    hidden = recurrence.type.shape[1]
    steps, batch, features = x.type.shape
    both = views.select(nodes, call.weight(3), 0, number) if call.has(3) else None
    width = weight.type.shape[0]
    biases = (None, None) if both is None else views.split_with_sizes(nodes, both, (width, width), 0)
    rows = views.reshape(nodes, x, (steps * batch, features))
    projected = _linear(nodes, rows, weight, biases[0])
    per_step = views.reshape(nodes, projected, (steps, batch, width))
    state, cell = (_initial(call, n, number, (batch, hidden), x.type.dtype) for n in (5, 6))
    outputs: list[Value] = []
    order = range(steps - 1, -1, -1) if backward else range(steps)
    for step in order:
        given = views.select(nodes, per_step, 0, step)
        if call.op == "LSTM":
            total = maths.add(nodes, given, _linear(nodes, state, recurrence, biases[1]))
            state, cell = lstm_cell(nodes, total, cell, hidden)
        elif call.op == "GRU":
            state = gru_cell(nodes, given, state, recurrence, biases[1], bool(call.get("linear_before_reset")))
        else:
            total = maths.add(nodes, given, _linear(nodes, state, recurrence, biases[1]))
            state = maths.unary(nodes, "tanh", total)
        outputs.append(state)
    return views.stack(nodes, outputs[::-1] if backward else outputs, 0), state, cell


def _initial(call: OnnxCall, index: int, number: int, shape: tuple[int, int], dtype: str) -> Value:
    if index < len(call.inputs) and call.has(index):
        given = call.value(index)
        return views.select(call.nodes, given, 1 if call.get("layout") else 0, number)
    return maths.full(call.nodes, shape, 0, dtype)


def _linear(nodes: Nodes, x: Value, weight: Value, bias: Value | None) -> Value:
    """x weight^T + bias."""
    turned = views.t(nodes, weight)
    return maths.mm(nodes, x, turned) if bias is None else maths.addmm(nodes, bias, x, turned)


def lstm_cell(nodes: Nodes, total: Value, cell: Value, hidden: int) -> tuple[Value, Value]:
    """New state and cell from the sum of both products; gates in the order input, output, forget, cell."""
    gates = views.split_with_sizes(nodes, total, (hidden,) * 4, 1)
    i, o, f = (maths.unary(nodes, "sigmoid", gate) for gate in gates[:3])
    candidate = maths.unary(nodes, "tanh", gates[3])
    cell = maths.add(nodes, maths.mul(nodes, f, cell), maths.mul(nodes, i, candidate))
    return maths.mul(nodes, o, maths.unary(nodes, "tanh", cell)), cell


def gru_cell(
    nodes: Nodes, given: Value, state: Value, recurrence: Value, bias: Value | None, linear_first: bool
) -> Value:
    """New state; gates in the order update, reset, hidden."""
    hidden = state.type.shape[1]
    update, reset, new = views.split_with_sizes(nodes, given, (hidden,) * 3, 1)
    if linear_first:
        parts = views.split_with_sizes(nodes, _linear(nodes, state, recurrence, bias), (hidden,) * 3, 1)
        z = maths.unary(nodes, "sigmoid", maths.add(nodes, update, parts[0]))
        r = maths.unary(nodes, "sigmoid", maths.add(nodes, reset, parts[1]))
        candidate = maths.add(nodes, new, maths.mul(nodes, r, parts[2]))
    else:
        gates = views.split_with_sizes(nodes, recurrence, (2 * hidden, hidden), 0)
        biases = (None, None) if bias is None else views.split_with_sizes(nodes, bias, (2 * hidden, hidden), 0)
        both = views.split_with_sizes(nodes, _linear(nodes, state, gates[0], biases[0]), (hidden, hidden), 1)
        z = maths.unary(nodes, "sigmoid", maths.add(nodes, update, both[0]))
        r = maths.unary(nodes, "sigmoid", maths.add(nodes, reset, both[1]))
        candidate = maths.add(nodes, new, _linear(nodes, maths.mul(nodes, r, state), gates[1], biases[1]))
    candidate = maths.unary(nodes, "tanh", candidate)
    return maths.add(nodes, candidate, maths.mul(nodes, z, maths.sub(nodes, state, candidate)))
