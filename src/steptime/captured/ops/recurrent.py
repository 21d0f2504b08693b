"""Recurrent layers of libraries, and fused cells."""

from __future__ import annotations

from typing import Final

from steptime.captured.graph import Node
from steptime.captured.ops.labels import Labels, OperatorDims, Special, labelled, labels, unlabelled
from steptime.captured.ops.operator import Operator
from steptime.captured.ops.placement import P, Placement
from steptime.captured.ops.work import KernelCall, OperatorWork, Shape, input_type, integer, moved
from steptime.cost.elementwise import pointwise_flops
from steptime.cost.recurrent import gate_flops, recurrent_backward_flops, recurrent_flops
from steptime.estimate.operators import Formula
from steptime.num import Num

GATES: Final = {0: 1, 1: 1, 2: 4, 3: 3}
"""Mode of cuDNN and oneDNN layers (ReLU, tanh, LSTM, GRU) -> number of gates."""


RAW: Final = frozenset({"_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn", "miopen_rnn_backward"})
"""Operators that run all layers at once and read ``batch_first``."""


CELL_OPERATIONS: Final = 24
"""Vector operations per state of a fused cell: four gates of 5 and the state."""


def _layer(node: Node) -> dict[str, Num]:
    """Sizes of a recurrent layer; oneDNN runs one layer and direction at a time, time first; others run all at once."""
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
    """A count over all layers; the input of layers above the first is the states of all directions."""
    above = {**s, "width": s["hidden"] * s["ways"]}
    return s["ways"] * (first(s) + (s["layers"] - 1) * first(above))


_FLOPS, _BACKWARD_FLOPS, _GATES = Formula(recurrent_flops), Formula(recurrent_backward_flops), Formula(gate_flops)


def _weights_each_step(s: Shape) -> Num:
    """Traffic of a layer: the matrix of the state is read at every step, all else once."""
    matrix = s["gates"] * s["hidden"] * s["hidden"] * s["element_bytes"] * s["layers"] * s["ways"]
    return s["read_bytes"] + s["written_bytes"] + (s["steps"] - 1) * matrix


def _curve(s: Shape) -> Shape:
    """Sizes for a curve; curves were measured on layers of equal width, with both products of a step."""
    products = (s["width"] + s["hidden"]) / s["hidden"]
    steps = s["steps"] * s["layers"] * s["ways"]
    return {**{n: s[n] for n in ("batch", "hidden", "gates", "element_bytes")}, "steps": steps, "products": products}


_OF_A_STATE: Final = ("hx", "cx", "hx_", "cx_", "cx_tmp", "hy_", "cy_", "grad_hy", "grad_cy")


def _layer_dims(node: Node) -> OperatorDims:
    """Dims of a layer: sequences are independent; gradients of weights are terms of a sum over them."""
    x = input_type(node, "input")
    first = bool(integer(node, "batch_first", 0)) and node.op in RAW
    sequence = labels("batch !steps !width" if first else "!steps batch !width")
    states = {2: labels("batch !hidden"), 3: labels(". batch !hidden")}
    given: list[Labels] = [
        sequence
        if name in ("input", "output", "grad_output")
        else states[value.type.rank]
        if name in _OF_A_STATE and value.type.rank in states
        else unlabelled(value.type)
        for name, value in zip(node.names, node.inputs, strict=True)
    ]
    state_shapes = {v.type.shape for n, v in zip(node.names, node.inputs, strict=True) if n in _OF_A_STATE}
    out: list[Labels] = [
        sequence
        if type.rank == 3 and type.shape[:2] == x.shape[:2]
        else states[type.rank]
        if type.shape in state_shapes
        else unlabelled(type)
        for type in node.outputs
    ]
    backward = node.op.endswith("_backward")
    summed: dict[int, Placement] = {n: P for n, each in enumerate(out) if backward and "batch" not in each}
    return OperatorDims(dims=labelled(node, given, out, {"batch": Special(kind="batch", outputs=summed)}))


def _cell_dims(node: Node) -> OperatorDims:
    """Dims of a cell: samples are independent; the gradient of a bias is a term of a sum over them."""
    given, out = (
        [labels("batch !hidden") if type.rank == 2 else unlabelled(type) for type in types]
        for types in ([value.type for value in node.inputs], node.outputs)
    )
    summed: dict[int, Placement] = {n: P for n, each in enumerate(out) if "batch" not in each}
    return OperatorDims(dims=labelled(node, given, out, {"batch": Special(kind="batch", outputs=summed)}))


_FORWARD = OperatorWork(
    sizes=_layer, matrix_flops=lambda s: _all_layers(_FLOPS, s), vector_flops=lambda s: _all_layers(_GATES, s),
    moved_bytes=_weights_each_step, launches=lambda s: 2 * s["steps"] * s["layers"] * s["ways"],
    kernels=lambda _, s: (KernelCall(operator="rnn_fwd", shape=_curve(s)),),
)  # fmt: skip
_BACKWARD = OperatorWork(
    sizes=_layer, matrix_flops=lambda s: _all_layers(_BACKWARD_FLOPS, s),
    vector_flops=lambda s: 2 * _all_layers(_GATES, s), moved_bytes=lambda s: 2 * _weights_each_step(s),
    launches=lambda s: 3 * s["steps"] * s["layers"] * s["ways"],
    kernels=lambda _, s: tuple(KernelCall(operator=f"rnn_bwd_{of}", shape=_curve(s)) for of in ("data", "weight")),
)  # fmt: skip
_CELL = OperatorWork(
    sizes=lambda _: {"operations": CELL_OPERATIONS}, vector_flops=Formula(pointwise_flops), kernels=moved
)
RECURRENT: Final = (
    Operator(names="mkldnn_rnn_layer _cudnn_rnn miopen_rnn", family="recurrent", work=_FORWARD, dims=_layer_dims),
    Operator(
        names="mkldnn_rnn_layer_backward _cudnn_rnn_backward miopen_rnn_backward", family="recurrent", work=_BACKWARD,
        dims=_layer_dims,
    ),
    Operator(
        names="_thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl _thnn_fused_gru_cell"
        " _thnn_fused_gru_cell_backward", family="recurrent", work=_CELL, dims=_cell_dims,
    ),
)  # fmt: skip
"""Layers of libraries (cuDNN, oneDNN, MIOpen) and cells."""
