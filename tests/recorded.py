"""What tests ask of recorded programs and imported files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.estimate.graph import work_of
from steptime.num import Num
from steptime.workload.graph import Call, Node, Phase, Program

if TYPE_CHECKING:
    from steptime.workload.capture.onnx.model import OnnxModel

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
