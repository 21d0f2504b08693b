"""Rows of recurrent layers, unrolled over time as PyTorch runs them without a fused kernel."""

from __future__ import annotations

from steptime.captured.aten import maths, views
from steptime.captured.graph.node import Nodes, Value
from steptime.captured.onnx.call import OnnxCall, Result, row

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
