"""Graphs as ONNX models: one row per operator; what has no row is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from steptime import __version__
from steptime.captured.graph import Node, TensorType, Value
from steptime.captured.graph.program import SOURCES
from steptime.errors import UserError, shorten
from steptime.rewrite.flow import COMPOSITE, Flow
from steptime.rewrite.fused import opened, results_of

if TYPE_CHECKING:
    from onnx import ModelProto

from steptime.rewrite.onnx_emitter import CODES, IR_VERSION, LARGEST_BYTES, OPSET, Emitter
from steptime.rewrite.onnx_rows import ROWS, opaque


def onnx_model(flow: Flow, contents: Mapping[str, Any]) -> ModelProto:
    """The graph as an ONNX model with its weights.

    Args:
        flow: a graph of a forward pass.
        contents: weights by name; constants are computed from them.

    Raises:
        UserError: an operator has no row, the graph trains, or the weights are over 2 GiB.
    """
    from onnx import helper

    if flow.training:
        raise UserError("a training step cannot be written as ONNX", hint="write it as a .py file")
    e = Emitter(flow)
    for number, value in enumerate(flow.inputs):
        e.put(value, str(value.node.attribute("name")) or f"input.{number}")
    for node in flow.order:
        _emit(e, node, contents)
    outputs = []
    for name, value in zip(_unique(flow.names, flow.inputs), flow.outputs, strict=True):
        e.nodes.append(helper.make_node("Identity", [e.name(value)], [name], name=f"output.{name}"))
        outputs.append(_declared(name, value.type))
    read = e.prune({output.name for output in outputs})
    stored = [tensor for name, tensor in e.constants.items() if name in read]
    size = sum(len(tensor.raw_data) for tensor in stored)
    if size > LARGEST_BYTES:
        raise UserError(f"the weights have {size} bytes, more than one ONNX file can hold", hint="write a .py file")
    inputs = [_declared(e.name(value), value.type) for value in flow.inputs]
    graph = helper.make_graph(e.nodes, shorten(flow.name) or "graph", inputs, outputs, stored)
    sets = [helper.make_opsetid("", OPSET), *(helper.make_opsetid(domain, 1) for domain in sorted(e.domains))]
    return helper.make_model(
        graph, opset_imports=sets, ir_version=IR_VERSION, producer_name="steptime", producer_version=__version__
    )


def _unique(names: Sequence[str], inputs: Sequence[Value]) -> list[str]:
    taken = {str(value.node.attribute("name")) for value in inputs}
    return [f"{name}.result" if name in taken else name for name in names]


def _declared(name: str, type: TensorType) -> Any:
    from onnx import helper

    return helper.make_tensor_value_info(name, CODES[type.dtype], list(type.shape))


def _emit(e: Emitter, node: Node, contents: Mapping[str, Any]) -> None:
    if node.op in SOURCES:
        if node.value() not in e.flow.inputs:
            e.put(node.value(), _stored(e, node, contents))
        return
    if node.op in COMPOSITE:
        steps = opened(e.flow.nodes, node)
        for step in steps:
            _emit(e, step, contents)
        for index, at in enumerate(results_of(node)):
            e.put(node.value(index), e.name(steps[at].value()))
        return
    row = ROWS.get(node.op)
    if row is None and node.op.startswith("onnx"):
        row = opaque
    if row is None:
        if node in e.flow.constant:
            from steptime.rewrite.kernels import evaluate

            for index in range(len(node.outputs)):
                e.put(node.value(index), e.tensor(evaluate(e.flow, [node.value(index)], contents)[0].numpy()))
            return
        raise UserError(f"the operator {shorten(node.op)!r} cannot be written as ONNX", hint="write a .py file")
    made = row(e, node)
    for index, name in enumerate([made] if isinstance(made, str) else made):
        if name:
            e.put(node.value(index), name)


def _stored(e: Emitter, node: Node, contents: Mapping[str, Any]) -> str:
    import torch
    from onnx import helper, numpy_helper

    from steptime.rewrite.kernels import evaluate

    name = str(node.attribute("name"))
    if name in e.constants:
        return name
    tensor = evaluate(e.flow, [node.value()], contents)[0].contiguous()
    if str(tensor.dtype) == "torch.bfloat16":
        raw = tensor.view(torch.int16).numpy().tobytes()
        e.constants[name] = helper.make_tensor(name, CODES["bf16"], list(tensor.shape), raw, raw=True)
    else:
        e.constants[name] = numpy_helper.from_array(tensor.numpy(), name)
    return name
