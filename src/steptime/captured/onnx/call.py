"""One ONNX node, as the handlers in the operator tables see it.

A row calls PyTorch on the tensors of the node: fake ones, whose operators are recorded, or real ones if all numbers are
known. Operators without a row are recorded as ``onnx::Name``, with output types that are inferred.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from steptime.captured import torch_parts as parts
from steptime.captured.graph.program import Attribute, TensorType
from steptime.captured.graph.strides import tensor_type, wrap
from steptime.captured.onnx.tensor import DTYPES, PACKED, Dims, Tensor, dtype_of, flat
from steptime.captured.record.values import TORCH_DTYPES

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto, TypeProto


#: Result of a row: one output or several; an output is a tensor of PyTorch, a :class:`Tensor`, or None.
Result = Any
OnnxRow = Callable[["OnnxCall"], Result]
Operand = torch.Tensor | bool | int | float

ROWS: dict[tuple[str, str], OnnxRow] = {}
"""(domain, operator) -> its row. The standard domain is the empty text."""


def row(*names: str, domain: str = "") -> Callable[[OnnxRow], OnnxRow]:
    """Decorator that adds a row to the table of operators; the row returns None for a call that it cannot express."""

    def entered(function: OnnxRow) -> OnnxRow:
        enter(dict.fromkeys(names, function), domain)
        return function

    return entered


def enter(table: Mapping[str, OnnxRow], domain: str = "") -> None:
    """Add rows by name."""
    ROWS.update({(domain, name): function for name, function in table.items()})


@dataclass(slots=True)
class OnnxCall:
    """Operator, inputs, attributes; problems of the file are raised as ``ValueError``."""

    op: str
    version: int
    """Version of the operator set."""
    inputs: list[Tensor | None]
    attributes: dict[str, Any]
    outputs: list[str]
    """Names of its outputs; an empty name for an output that nothing reads."""
    live: Callable[[Tensor, str], torch.Tensor]
    """Function that returns the fake tensor of a `Tensor`; a stored one becomes a graph source of the given kind."""
    folding: bool = False
    """True to compute with known numbers."""

    def has(self, index: int) -> bool:
        """True if an input is given."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def tensor(self, index: int) -> Tensor:
        """An input that must be given."""
        found = self.inputs[index] if index < len(self.inputs) else None
        if found is None:
            raise ValueError(f"input {index} is missing")
        return found

    def x(self, index: int = 0, kind: str = "constant") -> torch.Tensor:
        """An input as a tensor of PyTorch; ``kind`` is the kind of its source if the file stores it."""
        given = self.tensor(index)
        return given.array if self.folding and given.array is not None else self.live(given, kind)

    def maybe(self, index: int) -> torch.Tensor | None:
        """An input as a tensor of PyTorch; None if it is not given."""
        return self.x(index) if self.has(index) else None

    def weight(self, index: int) -> torch.Tensor:
        """An input that is a parameter if the file stores it, even as a constant."""
        return self.x(index, "parameter")

    def maybe_weight(self, index: int) -> torch.Tensor | None:
        """An input that is a parameter if the file stores it; None if it is not given."""
        return self.weight(index) if self.has(index) else None

    def all(self) -> list[torch.Tensor]:
        """All inputs as tensors of PyTorch."""
        return [self.x(index) for index in range(len(self.inputs))]

    def operand(self, index: int, beside: int | None = None) -> Operand:
        """An element-wise operand: a known number, no weight and at most of the rank of `beside`, else a tensor."""
        given = self.tensor(index)
        rank = 0 if beside is None else len(self.tensor(beside).shape)
        if given.array is not None and given.array.numel() == 1 and len(given.shape) <= rank and not given.weight:
            (number,) = flat(given.array)
            if isinstance(number, (bool, int, float)):
                return number
        return self.x(index)

    def known(self, index: int) -> list[Any]:
        """Numbers of an input, such as a shape, which must not depend on data."""
        found = self.tensor(index)
        array = found.numbers()
        if array is None:
            text = f"input {index} ({found.name!r}) must be known before the model runs"
            if found.elsewhere is not None:
                text += f"; its data are in {found.elsewhere!r}: is that next to the file?"
            raise ValueError(text)
        return flat(array)

    def one(self, index: int, default: Any = None) -> Any:
        """The first number of an input that may be missing."""
        return self.known(index)[0] if self.has(index) else default

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute."""
        return self.attributes.get(name, default)

    def ints(self, name: str, index: int | None = None) -> tuple[int, ...] | None:
        """Integers from an attribute or, in later versions, from an input; None if neither is given."""
        given = self.attributes.get(name)
        if given is None and index is not None and self.has(index):
            given = self.known(index)
        if isinstance(given, int):
            given = [given]
        return None if given is None else tuple(int(number) for number in given)

    def axes(self, index: int | None = 1) -> tuple[int, ...] | None:
        """Dims from the attribute or input ``axes``, counted from the front."""
        given = self.ints("axes", index)
        return None if given is None else tuple(wrap(axis, len(self.tensor(0).shape)) for axis in given)

    def axis(self, default: int) -> int:
        """Dim from the attribute ``axis``."""
        return wrap(int(self.get("axis", default)), len(self.tensor(0).shape))


def real(values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Numbers that are known, as a tensor with memory."""
    with parts.without_modes():
        return torch.tensor(values, dtype=dtype)


def types_of_opaque(
    call: OnnxCall, node: NodeProto, declared: Mapping[str, TypeProto], dims: Dims
) -> list[TensorType | None]:
    """Types of the outputs of a node that computes something unknown.

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
    return types


def plain(attributes: Mapping[str, Any]) -> dict[str, Attribute]:
    """Attributes that are numbers, texts or tuples of these."""
    kept: dict[str, Attribute] = {}
    for name, given in attributes.items():
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
    """A type of the file; None if a size is unknown."""
    if not proto.HasField("tensor_type") or not proto.tensor_type.HasField("shape"):
        return None
    if proto.tensor_type.elem_type not in DTYPES:
        return None
    sizes = [dims.known(dim) for dim in proto.tensor_type.shape.dim]
    if any(size is None for size in sizes):
        return None
    return tensor_type([size for size in sizes if size is not None], dtype_of(proto.tensor_type.elem_type))


def _inferred(call: OnnxCall, node: NodeProto, dims: Dims) -> list[TensorType | None] | None:
    """Output types by the inference rule of the ``onnx`` library."""
    import onnx
    from onnx import checker, defs, helper, numpy_helper, shape_inference

    if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
        return None
    try:
        schema = defs.get_schema(node.op_type, call.version, node.domain)
    except defs.SchemaError:
        return None
    codes = {name: number for number, name in DTYPES.items() if number not in PACKED}
    given, data = {}, {}
    for name, tensor in zip(node.input, call.inputs, strict=True):
        if tensor is not None:
            given[name] = helper.make_tensor_type_proto(codes[tensor.dtype], tensor.shape)
            array = tensor.numbers()
            if array is not None and array.dtype not in _NOT_NUMPY:
                data[name] = numpy_helper.from_array(array.numpy())
    try:
        found = shape_inference.infer_node_outputs(
            schema, node, given, data, opset_imports=[onnx.helper.make_opsetid(node.domain, call.version)]
        )
    except checker.ValidationError as problem:
        raise ValueError(next(iter(str(problem).splitlines()), "the file breaks the operator's rules")) from None
    except (shape_inference.InferenceError, RuntimeError, ValueError, TypeError):
        return None
    return _declared(node, found, dims)


_NOT_NUMPY = frozenset({torch.bfloat16, TORCH_DTYPES["fp8"], TORCH_DTYPES["fp8_e5m2"]})


def outer_names(graph: GraphProto) -> set[str]:
    """Outer names that a sub-graph reads or returns."""
    made = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    free: set[str] = set()
    for node in graph.node:
        free |= {name for name in node.input if name and name not in made}
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                free |= outer_names(inner) - made
        made |= set(node.output)
    return free | ({value.name for value in graph.output} - made)
