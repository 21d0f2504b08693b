"""Graphs as ONNX models by ``torch.onnx.export``; operators unknown to the exporter are refused by name."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from steptime import __version__
from steptime.captured.graph import Value
from steptime.errors import UserError, shorten
from steptime.registry import require
from steptime.rewrite.flow import Flow, substituted

if TYPE_CHECKING:
    from onnx import ModelProto

OPSET: Final = 23
"""Operator set of written files, which has Attention and RMSNormalization."""
_VIEWS: Final = ("view", "_unsafe_view", "reshape")
LARGEST_BYTES: Final = 2**31 - 2**20
"""Largest number of bytes of weights in one protobuf message, with room for the nodes."""


def onnx_model(flow: Flow, contents: Mapping[str, Any]) -> ModelProto:
    """The graph as an ONNX model with its weights.

    Args:
        flow: a graph of a forward pass.
        contents: weights by name, from which constants are computed.

    Raises:
        UserError: PyTorch's exporter has no form for an operator, the graph trains, the weights are over 2 GiB, or
            ``onnx`` or ``onnxscript`` is not installed.
    """
    for library in ("onnx", "onnxscript"):
        require(library, "writing an ONNX file")
    import torch

    from steptime.captured.record.values import TORCH_DTYPES
    from steptime.rewrite.export_torch import graph_module, weight_nodes

    if flow.training:
        raise UserError("a training step cannot be written as ONNX", hint="write it as a .py file")
    stored = {node: f"const_{number}" for number, node in enumerate(weight_nodes(flow))}
    size = sum(node.outputs[0].size_bytes for node in stored)
    if size > LARGEST_BYTES:
        raise UserError(f"the weights have {size} bytes, more than one ONNX file can hold", hint="write a .py file")
    module = graph_module(_with_whole_products(flow), contents, stored)
    given = tuple(torch.zeros(value.type.shape, dtype=TORCH_DTYPES[value.type.dtype]) for value in flow.inputs)
    inputs = [str(value.node.attribute("name")) or f"input.{n}" for n, value in enumerate(flow.inputs)]
    outputs = [f"{name}.result" if name in inputs else name for name in flow.names]
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            made = torch.onnx.export(
                module,
                given,
                dynamo=True,
                opset_version=OPSET,
                optimize=False,
                verbose=False,
                input_names=inputs,
                output_names=outputs,
            )
    except torch.onnx.OnnxExporterError as problem:
        raise _refused(problem) from None
    finally:
        logging.disable(level)
    assert made is not None
    return _named(made.model_proto, {own: str(node.attribute("name")) for node, own in stored.items()})


def _with_whole_products(flow: Flow) -> Flow:
    """Products with several batch dims as single ``matmul`` operators: views would hinder fusion in a runtime."""
    found = {}
    for node in flow.by_op.get("bmm", ()):
        a, b = map(_before_views, node.inputs)
        whole = (*a.type.shape[:-1], b.type.shape[-1])
        for reader in flow.users.get(node.value(), ()):
            if reader.op in _VIEWS and reader.outputs[0].shape == whole and a.type.shape[:-2] == b.type.shape[:-2]:
                made = flow.nodes.apply("matmul", {"self": a, "other": b}, outputs=reader.outputs)
                found[reader.value()] = made.value()
    return substituted(flow, found, {}) if found else flow


def _before_views(value: Value) -> Value:
    """The value before its batch dims were merged."""
    while value.node.op in (*_VIEWS, "expand"):
        before = value.node.inputs[0]
        if before.type.elements != value.type.elements or before.type.shape[-2:] != value.type.shape[-2:]:
            break
        value = before
    return value


def _refused(problem: BaseException) -> UserError:
    """The error for a graph that PyTorch cannot write: it names the operator if known, else it has PyTorch's text."""
    text, cause = str(problem), problem.__cause__
    while cause is not None:
        text, cause = f"{text}\n{cause}", cause.__cause__
    found = re.findall(r"OpOverload\(op='(?:aten\.)?([\w.]+)'", text)
    what = f"the operator {found[-1]!r}" if found else f"the graph ({shorten(text.splitlines()[-1], 200)})"
    return UserError(f"{what} cannot be written as ONNX", hint="write a .py file")


def _named(model: ModelProto, names: Mapping[str, str]) -> ModelProto:
    """The model with the weights under their own names and without PyTorch's metadata."""
    used = {name for node in model.graph.node for name in (*node.input, *node.output)}
    names = {own: name for own, name in names.items() if name not in used}
    for tensor in model.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
        del tensor.metadata_props[:]
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        del node.metadata_props[:]
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        del value.metadata_props[:]
    del model.graph.value_info[:], model.graph.metadata_props[:], model.metadata_props[:]
    model.producer_name, model.producer_version = "steptime", __version__
    return model
