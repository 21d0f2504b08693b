"""Recurrent layers and fused cells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from steptime.captured.cost.work import KernelCall, OperatorRow, Shape, input_type, integer, moved
from steptime.captured.graph import Node
from steptime.cost.elementwise import pointwise_flops
from steptime.cost.recurrent import gate_flops, recurrent_backward_flops, recurrent_flops
from steptime.estimate.operators import Formula
from steptime.num import Num

GATES: Final = {0: 1, 1: 1, 2: 4, 3: 3}
"""Gates by the mode of cuDNN and oneDNN layers: ReLU, tanh, LSTM, GRU."""
RAW: Final = frozenset({"_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn", "miopen_rnn_backward"})
"""Operators that take the input as it is, and all layers."""
CELL_OPERATIONS: Final = 24
"""Vector operations per state of a fused cell: four gates of 5 and the state."""


def _layer(node: Node) -> dict[str, Num]:
    """oneDNN runs one layer in one direction at a time, with time first; the others all layers at once."""
    steps, batch, width = input_type(node, "input").shape
    if bool(integer(node, "batch_first", 0)) and node.op in RAW:
        steps, batch = batch, steps
    gates = GATES.get(integer(node, "mode", 2), 4)
    return {
        "batch": batch, "steps": steps, "width": width, "hidden": integer(node, "hidden_size", width), "gates": gates,
        "layers": integer(node, "num_layers", 1) if node.op in RAW else 1,
        "ways": 1 + integer(node, "bidirectional", 0) if node.op in RAW else 1,
    }  # fmt: skip


def _all_layers(first: Formula, s: Shape) -> Num:
    """Layers above the first see the states of all directions as input."""
    above = {**s, "width": s["hidden"] * s["ways"]}
    return s["ways"] * (first(s) + (s["layers"] - 1) * first(above))


_FLOPS, _BACKWARD_FLOPS, _GATES = Formula(recurrent_flops), Formula(recurrent_backward_flops), Formula(gate_flops)


def _weights_each_step(s: Shape) -> Num:
    """The matrix of the state is read at every step, all else once."""
    matrix = s["gates"] * s["hidden"] * s["hidden"] * s["element_bytes"] * s["layers"] * s["ways"]
    return s["read_bytes"] + s["written_bytes"] + (s["steps"] - 1) * matrix


def _forward_kernel(node: Node, s: Shape) -> tuple[KernelCall, ...]:
    """Layers of equal width, as the curves were measured: both products of a step beside one another."""
    return (KernelCall(operator="rnn_fwd", shape=_curve(s)),)


def _backward_kernels(node: Node, s: Shape) -> tuple[KernelCall, ...]:
    return tuple(KernelCall(operator=f"rnn_bwd_{what}", shape=_curve(s)) for what in ("data", "weight"))


def _curve(s: Shape) -> Shape:
    products = (s["width"] + s["hidden"]) / s["hidden"]
    steps = s["steps"] * s["layers"] * s["ways"]
    return {**{n: s[n] for n in ("batch", "hidden", "gates", "element_bytes")}, "steps": steps, "products": products}


_FORWARD = OperatorRow(
    sizes=_layer, matrix_flops=lambda s: _all_layers(_FLOPS, s), vector_flops=lambda s: _all_layers(_GATES, s),
    moved_bytes=_weights_each_step, launches=lambda s: 2 * s["steps"] * s["layers"] * s["ways"],
    kernels=_forward_kernel,
)  # fmt: skip
_BACKWARD = OperatorRow(
    sizes=_layer, matrix_flops=lambda s: _all_layers(_BACKWARD_FLOPS, s),
    vector_flops=lambda s: 2 * _all_layers(_GATES, s), moved_bytes=lambda s: 2 * _weights_each_step(s),
    launches=lambda s: 3 * s["steps"] * s["layers"] * s["ways"], kernels=_backward_kernels,
)  # fmt: skip


def _states(node: Node) -> dict[str, Num]:
    return {"operations": CELL_OPERATIONS}


_CELL = OperatorRow(sizes=_states, vector_flops=Formula(pointwise_flops), kernels=moved)

TABLE: Final[Mapping[str, OperatorRow]] = {
    **dict.fromkeys(("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"), _FORWARD),
    **dict.fromkeys(("mkldnn_rnn_layer_backward", "_cudnn_rnn_backward", "miopen_rnn_backward"), _BACKWARD),
    **dict.fromkeys(
        ("_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward_impl", "_thnn_fused_gru_cell",
         "_thnn_fused_gru_cell_backward"), _CELL,
    ),
}  # fmt: skip
