"""What tests ask of recorded programs and imported files."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from steptime.captured.cost import work_of
from steptime.captured.graph import Call, Node, Phase, Program
from steptime.num import Num

if TYPE_CHECKING:
    from steptime.captured.onnx.step import OnnxModel

CAUSAL = ("is_causal", "custom_mask_type")
"""Attributes by which attention is told that its mask is causal."""


def calls_of(program: Program, phase: Phase) -> list[Call]:
    """The calls of one phase."""
    return [call for call in program.calls if call.phase == phase]


def full_flops(node: Node) -> Num:
    """Matrix operations as ``torch.utils.flop_counter`` counts them: causal attention without its mask."""
    kept = tuple((name, value) for name, value in node.attributes if name not in CAUSAL)
    return work_of(Node(node.op, node.inputs, node.names, kept, node.outputs, node.number)).matrix_flops


def opaque_nodes(model: OnnxModel) -> list[Node]:
    """Nodes of operators without a row, which carry types and no meaning."""
    return [node for node in model.graph.nodes() if node.op.startswith("onnx")]


def excess_of_grouped_weights(program: Program) -> int:
    """PyTorch's counter takes the gradient of grouped weights as if there were one group."""
    excess = 0
    for call in program.calls:
        node = call.node
        if node.op == "convolution_backward" and node.attribute("groups") > 1:
            n, channels_out, *pixels = node.input("grad_output").type.shape
            _, inside, *taps = node.input("weight").type.shape
            one_group = 2 * n * channels_out * inside * math.prod([*pixels, *taps])
            excess += (node.attribute("groups") - 1) * one_group
    return excess
