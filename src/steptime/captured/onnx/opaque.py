"""Operators without a row: they stay in the graph as ``onnx::Name``, with the output types that can be inferred."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptime.captured.aten.layout import tensor_type
from steptime.captured.graph.node import Attribute, Value
from steptime.captured.graph.types import TensorType
from steptime.captured.onnx.call import OnnxCall
from steptime.captured.onnx.dims import Dims
from steptime.captured.onnx.tensor import DTYPES, Tensor, dtype_of, read_array

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto, TypeProto


def opaque(
    call: OnnxCall, node: NodeProto, declared: Mapping[str, TypeProto], dims: Dims, outer: list[Tensor]
) -> list[Any]:
    """A node that computes something unknown from its inputs and from what its sub-graphs read.

    Raises:
        ValueError: the type of an output is neither declared in the file nor inferred by the ``onnx`` library, or the
            node has more inputs, outputs or attributes than the operator.
    """
    types = _declared(node, declared, dims)
    if types is None:
        types = _inferred(call, node, dims)
    if types is None:
        raise ValueError(
            f"nothing is known of the operator {node.op_type!r}"
            + (f" of {node.domain!r}" if node.domain else "")
            + "; its outputs need types in the file (value_info)"
        )
    inputs: dict[str, Value] = {}
    for n, given in enumerate([*call.inputs, *outer]):
        if given is not None:
            inputs[f"input{n}"] = given.of(call.nodes)
    space = f"onnx.{node.domain}" if node.domain else "onnx"
    made = call.nodes.apply(f"{space}::{node.op_type}", inputs, _plain(call), outputs=[t for t in types if t])
    values = iter(made.value(n) for n in range(len(made.outputs)))
    return [next(values) if type else None for type in types]


def _plain(call: OnnxCall) -> dict[str, Attribute]:
    """Attributes that are numbers, texts or tuples of those."""
    kept: dict[str, Attribute] = {}
    for name, given in call.attributes.items():
        if isinstance(given, (bool, int, float, str)):
            kept[name] = given
        elif isinstance(given, (list, tuple)) and all(isinstance(item, (int, float, str)) for item in given):
            kept[name] = tuple(given)
    return kept


def _declared(node: NodeProto, declared: Mapping[str, TypeProto], dims: Dims) -> list[TensorType | None] | None:
    types: list[TensorType | None] = []
    for name in node.output:
        type = _type(declared[name], dims) if name in declared else None
        if name and type is None:
            return None
        types.append(type)
    return types


def _type(proto: TypeProto, dims: Dims) -> TensorType | None:
    """A type whose sizes are all known, else None."""
    if not proto.HasField("tensor_type") or not proto.tensor_type.HasField("shape"):
        return None
    if proto.tensor_type.elem_type not in DTYPES:
        return None
    sizes = [dims.known(dim) for dim in proto.tensor_type.shape.dim]
    if any(size is None for size in sizes):
        return None
    return tensor_type([size for size in sizes if size is not None], dtype_of(proto.tensor_type.elem_type))


def _inferred(call: OnnxCall, node: NodeProto, dims: Dims) -> list[TensorType | None] | None:
    """What the library's own rule for the operator says."""
    import onnx
    from onnx import checker, defs, helper, numpy_helper, shape_inference

    if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
        return None
    try:
        schema = defs.get_schema(node.op_type, call.version, node.domain)
    except defs.SchemaError:
        return None
    numbers = {name: number for number, name in DTYPES.items() if number not in (21, 22)}
    given, data = {}, {}
    for name, tensor in zip(node.input, call.inputs, strict=True):
        if tensor is not None:
            given[name] = helper.make_tensor_type_proto(numbers[tensor.type.dtype], tensor.type.shape)
            array = tensor.array if tensor.stored is None else read_array(tensor.stored)
            if array is not None:
                data[name] = numpy_helper.from_array(array)
    try:
        found = shape_inference.infer_node_outputs(
            schema, node, given, data, opset_imports=[onnx.helper.make_opsetid(node.domain, call.version)]
        )
    except checker.ValidationError as problem:
        raise ValueError(next(iter(str(problem).splitlines()), "the file breaks the operator's rules")) from None
    except (shape_inference.InferenceError, RuntimeError, ValueError, TypeError):
        return None
    return _declared(node, found, dims)


def captured(graph: GraphProto) -> set[str]:
    """Names that a sub-graph reads from outside."""
    made = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    free: set[str] = set()
    for node in graph.node:
        free |= {name for name in node.input if name and name not in made}
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                free |= captured(inner) - made
        made |= set(node.output)
    return free | ({value.name for value in graph.output} - made)
