"""One node of an ONNX graph, as the rows of the operator tables see it.

Operators without a row stay in the graph as ``onnx::Name``, with the output types that can be inferred.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steptime.captured.aten import maths
from steptime.captured.aten.views import tensor_type, wrap
from steptime.captured.graph.program import Attribute, Nodes, TensorType, Value
from steptime.captured.onnx.tensor import DTYPES, Dims, Tensor, dtype_of, read_array

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import GraphProto, NodeProto, TypeProto

    Array = NDArray[Any]


#: What a row makes: one output, or several; an output is a value, an array that is known, or nothing.
Result = Any
OnnxRow = Callable[["OnnxCall"], Result]

ROWS: dict[tuple[str, str], OnnxRow] = {}
"""(domain, operator) -> its row. The standard domain is the empty text."""


def row(*names: str, domain: str = "") -> Callable[[OnnxRow], OnnxRow]:
    """Enter a function in the table of operators; it returns None where it cannot express the call."""

    def enter(function: OnnxRow) -> OnnxRow:
        for name in names:
            ROWS[(domain, name)] = function
        return function

    return enter


@dataclass(slots=True)
class OnnxCall:
    """Operator, inputs, attributes; problems of the file are raised as ``ValueError``."""

    nodes: Nodes
    op: str
    version: int
    """Version of the operator set."""
    inputs: list[Tensor | None]
    attributes: dict[str, Any]
    outputs: list[str]

    def has(self, index: int) -> bool:
        """Whether that input is given."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def tensor(self, index: int) -> Tensor:
        """An input that must be given."""
        found = self.inputs[index] if index < len(self.inputs) else None
        if found is None:
            raise ValueError(f"input {index} is missing")
        return found

    def type(self, index: int = 0) -> TensorType:
        """Type of an input that must be given."""
        return self.tensor(index).type

    def value(self, index: int = 0) -> Value:
        """An input as a value."""
        return self.tensor(index).of(self.nodes)

    def maybe(self, index: int) -> Value | None:
        """An input as a value, None where it is not given."""
        return self.value(index) if self.has(index) else None

    def weight(self, index: int) -> Value:
        """An input that is a parameter if the file stores it, also where it is stored as a constant."""
        return self.tensor(index).of(self.nodes, "parameter")

    def maybe_weight(self, index: int) -> Value | None:
        """The same, None where it is not given."""
        return self.weight(index) if self.has(index) else None

    def values(self) -> list[Value]:
        """All inputs."""
        return [self.value(index) for index in range(len(self.inputs))]

    def operand(self, index: int, beside: int | None = None) -> maths.Operand:
        """An input of an element-wise operator: a number where it is one that is known, else a value."""
        given = self.tensor(index)
        rank = 0 if beside is None else self.type(beside).rank
        if given.array is not None and given.array.size == 1 and given.type.rank <= rank and not given.weight:
            number = given.array.reshape(-1)[0].item()
            if isinstance(number, (bool, int, float)):
                return number
        return self.value(index)

    def known(self, index: int) -> Array:
        """Numbers of an input; shapes and the like must not depend on data."""
        found = self.tensor(index)
        array = found.numbers()
        if array is None:
            text = f"input {index} ({found.name!r}) must be known before the model runs"
            if found.elsewhere is not None:
                text += f"; its data are in {found.elsewhere!r}: is that beside the file?"
            raise ValueError(text)
        return array

    def maybe_known(self, index: int) -> Array | None:
        """Numbers of an input that may be missing."""
        return self.known(index) if self.has(index) else None

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute."""
        return self.attributes.get(name, default)

    def ints(self, name: str, index: int | None = None) -> tuple[int, ...] | None:
        """Whole numbers from an attribute or, in later versions, from an input; None where neither is given."""
        given = self.attributes.get(name)
        if given is None and index is not None and self.has(index):
            given = self.known(index).reshape(-1).tolist()
        if isinstance(given, int):
            given = [given]
        return None if given is None else tuple(int(number) for number in given)

    def axes(self, index: int | None = 1, of: int = 0) -> tuple[int, ...] | None:
        """Dims from the attribute or input ``axes``, counted from the front."""
        given = self.ints("axes", index)
        return None if given is None else tuple(wrap(axis, self.type(of).rank) for axis in given)

    def axis(self, default: int, of: int = 0) -> int:
        """Dim from the attribute ``axis``."""
        return wrap(int(self.get("axis", default)), self.type(of).rank)


def chain(nodes: Nodes, op: str, values: Sequence[Value]) -> Value:
    """A binary operator over many values, from the left."""
    result = values[0]
    for value in values[1:]:
        result = maths.binary(nodes, op, result, value)
    return result


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
