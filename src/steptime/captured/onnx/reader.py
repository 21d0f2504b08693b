"""From the nodes of an ONNX graph to the nodes of ours.

The small integer sums that exporters leave in a graph (shapes, indices) are computed while it is read.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from steptime.captured.aten import views
from steptime.captured.graph.program import SOURCES, Nodes, TensorType, Value
from steptime.captured.onnx import elementwise, layers, products, shapes  # noqa: F401  (they enter rows)
from steptime.captured.onnx.call import ROWS, OnnxCall, captured, opaque
from steptime.captured.onnx.load import MAX_NODES
from steptime.captured.onnx.tensor import FOLDED, GENERATED, MAX_FOLDED_ELEMENTS, Dims, Tensor, read_array
from steptime.captured.onnx.weights import written
from steptime.errors import InputFileError, UserError, shorten
from steptime.model.spec import FLOATS

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto

    Array = NDArray[Any]


Attributes = dict[str, Any]
Fold = Callable[[Sequence[Any], Attributes], Any]


def _axes(inputs: Sequence[Any], attributes: Attributes) -> tuple[int, ...] | None:
    given = attributes.get("axes")
    if given is None and len(inputs) > 1 and inputs[1] is not None:
        given = inputs[1].reshape(-1).tolist()
    return None if given is None else tuple(int(axis) for axis in given)


def _slice(inputs: Sequence[Any], attributes: Attributes) -> Array:
    data = inputs[0]
    starts, ends, axes, steps = [*inputs[1:], None, None, None, None][:4]
    starts = attributes.get("starts", starts)
    ends = attributes.get("ends", ends)
    axes = attributes.get("axes", axes)
    index = [slice(None)] * data.ndim
    for n, (start, end) in enumerate(zip(np.ravel(starts), np.ravel(ends), strict=True)):
        step = 1 if steps is None else int(steps[n])
        stop: int | None = int(end)
        if step < 0 and int(end) < -data.shape[n if axes is None else int(axes[n])]:
            stop = None
        index[n if axes is None else int(axes[n])] = slice(int(start), stop, step)
    return np.asarray(data[tuple(index)])


def _reshape(inputs: Sequence[Any], attributes: Attributes) -> Array:
    data, shape = inputs[0], [int(size) for size in inputs[1]]
    if not attributes.get("allowzero"):
        shape = [data.shape[n] if size == 0 else size for n, size in enumerate(shape)]
    return np.asarray(data.reshape(shape))


def _unsqueeze(inputs: Sequence[Any], attributes: Attributes) -> Array:
    axes = _axes(inputs, attributes) or ()
    return np.asarray(np.expand_dims(inputs[0], axes))


def _range(inputs: Sequence[Any], _: Attributes) -> Array:
    start, limit, delta = (array.reshape(-1)[0] for array in inputs)
    return np.arange(start, limit, delta, dtype=inputs[0].dtype)


def _divide(inputs: Sequence[Any], _: Attributes) -> Array:
    a, b = inputs
    if a.dtype.kind in "iu":
        return np.asarray(np.trunc(np.true_divide(a, b)).astype(a.dtype))
    return np.asarray(a / b)


def _reduce(function: Any) -> Fold:
    def fold(inputs: Sequence[Any], attributes: Attributes) -> Array:
        axes = _axes(inputs, attributes)
        if axes is None and attributes.get("noop_with_empty_axes"):
            return np.asarray(inputs[0])
        keep = bool(attributes.get("keepdims", 1))
        return np.asarray(function(inputs[0], axis=axes, keepdims=keep)).astype(inputs[0].dtype)

    return fold


def _map(function: Any) -> Fold:
    def fold(inputs: Sequence[Any], _: Attributes) -> Array:
        result = np.asarray(function(*inputs))
        same = result.dtype.kind != "b" and inputs[-1].dtype.kind != "b"
        return np.asarray(result.astype(inputs[-1].dtype) if same else result)

    return fold


#: ONNX operator -> the same on arrays.
FOLDS: dict[str, Fold] = {
    "Add": _map(np.add), "Sub": _map(np.subtract), "Mul": _map(np.multiply), "Div": _divide, "Neg": _map(np.negative),
    "Mod": _map(np.mod), "Abs": _map(np.abs), "Sqrt": _map(np.sqrt), "Pow": _map(np.power), "Exp": _map(np.exp),
    "Floor": _map(np.floor), "Ceil": _map(np.ceil), "Min": _map(np.minimum), "Max": _map(np.maximum),
    "Reciprocal": _map(np.reciprocal), "Log": _map(np.log), "Sin": _map(np.sin), "Cos": _map(np.cos),
    "Equal": _map(np.equal), "Greater": _map(np.greater), "GreaterOrEqual": _map(np.greater_equal),
    "Less": _map(np.less), "LessOrEqual": _map(np.less_equal), "And": _map(np.logical_and),
    "Or": _map(np.logical_or), "Not": _map(np.logical_not),
    "Where": lambda i, a: np.asarray(np.where(*i)).astype(i[1].dtype),
    "Gather": lambda i, a: np.asarray(np.take(i[0], i[1].astype(np.int64), axis=int(a.get("axis", 0)))),
    "Concat": lambda i, a: np.concatenate(i, axis=int(a["axis"])),
    "Unsqueeze": _unsqueeze,
    "Squeeze": lambda i, a: np.squeeze(i[0], axis=_axes(i, a)),
    "Slice": _slice, "Reshape": _reshape, "Range": _range,
    "Flatten": lambda i, a: i[0].reshape(int(np.prod(i[0].shape[: int(a.get("axis", 1))], dtype=np.int64)), -1),
    "Transpose": lambda i, a: np.transpose(i[0], a.get("perm")),
    "Expand": lambda i, a: np.asarray(i[0] * np.ones([int(s) for s in i[1]], dtype=i[0].dtype)),
    "Tile": lambda i, a: np.tile(i[0], [int(n) for n in i[1]]),
    "CumSum": lambda i, a: np.cumsum(i[0], axis=int(i[1].reshape(-1)[0]), dtype=i[0].dtype),
    "ReduceSum": _reduce(np.sum), "ReduceProd": _reduce(np.prod), "ReduceMax": _reduce(np.max),
    "ReduceMin": _reduce(np.min), "ReduceMean": _reduce(np.mean),
}  # fmt: skip


def result_elements(op: str, inputs: Sequence[Any]) -> int:
    """Elements that the result of a fold has at most, known before it is made."""
    arrays = [array for array in inputs if array is not None]
    sizes: list[int] = [max(int(array.size), 1) for array in arrays]
    if op == "Expand":
        return sizes[0] * math.prod(max(int(s), 1) for s in inputs[1])
    if op == "Tile":
        return sizes[0] * math.prod(max(int(n), 1) for n in inputs[1])
    if op == "Range":
        start, limit, delta = (float(array.reshape(-1)[0]) for array in arrays)
        return int(abs((limit - start) / delta)) + 1 if delta else MAX_FOLDED_ELEMENTS + 1
    if op == "Gather":
        return sizes[0] * sizes[1]
    if op == "Concat":
        return sum(sizes)
    rank = max(array.ndim for array in arrays)
    shape: list[int] = [max((a.shape[-d] for a in arrays if a.ndim >= d), default=1) for d in range(1, rank + 1)]
    return max(math.prod(shape), *sizes)


def fold(op: str, inputs: Sequence[Any], attributes: Attributes) -> Any:
    """Result of the operator on arrays; None where there is no row for it or the result would be large."""
    row = FOLDS.get(op)
    if row is None or not inputs or result_elements(op, inputs) > MAX_FOLDED_ELEMENTS:
        return None
    if op in ("Min", "Max") and len(inputs) != 2:
        return None
    with np.errstate(all="ignore"):
        return row(inputs, attributes)


STANDARD = ("", "ai.onnx")
"""Names of the domain of the standard operators."""


class Reader:
    """Reads one model into one table of nodes."""

    def __init__(self, path: str, model: ModelProto, dims: Dims) -> None:
        self.path = path
        self.dims = dims
        self.nodes = Nodes()
        self.modules: list[str] = []
        """Module path of each node, by number."""
        self._model = model
        self._versions = {"" if o.domain in STANDARD else o.domain: int(o.version) for o in model.opset_import}
        self._declared: dict[str, TypeProto] = {}
        self._count = 0
        self._known: list[Tensor] = []
        self.written = written(model.graph)
        self._owned: dict[str, Tensor] = {}
        """Tensors that are stored under the name of an equal one, by their own name."""
        self._first: dict[tuple[str, TensorType], Tensor] = {}
        """The first copy of a tensor that is not stored itself."""

    def read(self) -> tuple[Value, ...]:
        """The outputs of the graph."""
        graph = self._model.graph
        names: dict[str, Tensor] = {}
        self._stored(graph, names)
        types = [(value.name, self.dims.input_type(value)) for value in graph.input if value.name not in names]
        self.dims.check()
        for name, type in types:
            assert type is not None
            names[name] = Tensor.of_value(name, self.nodes.source("input", name, type))
        self._graph(graph, names)
        outputs = [self._output(names, value.name) for value in graph.output]
        if not outputs:
            raise InputFileError(self.path, "its graph has no outputs")
        self._fill_modules("")
        return tuple(outputs)

    def _graph(self, graph: GraphProto, names: dict[str, Tensor]) -> None:
        self._declared |= {value.name: value.type for value in (*graph.value_info, *graph.output)}
        for node in graph.node:
            self._count += 1
            if self._count > MAX_NODES or len(self.nodes) > 4 * MAX_NODES:
                raise InputFileError(self.path, f"more than {MAX_NODES} nodes")
            try:
                self._node(node, names)
            except InputFileError:
                raise
            except (UserError, ValueError) as problem:
                raise self._refused(node, names, shorten(str(problem), 300) or "cannot be read") from None
            except (TypeError, LookupError, ArithmeticError, AttributeError) as problem:
                what = f"{type(problem).__name__}: {shorten(str(problem), 100)}"
                raise self._refused(node, names, f"its inputs or attributes do not fit it ({what})") from None
            self._fill_modules(module_path(node))

    def _refused(self, node: NodeProto, names: Mapping[str, Tensor], text: str) -> InputFileError:
        """The error for a node, with what the file gives it."""
        inputs = ", ".join(_given(name, names) for name in node.input) or "none"
        attributes = ", ".join(attribute.name for attribute in node.attribute) or "none"
        hint = f"inputs: {shorten(inputs, 300)}; attributes: {shorten(attributes)}"
        return InputFileError(self.path, f"node {shorten(node.name)!r} ({node.op_type}): {text}", hint=hint)

    def _fill_modules(self, path: str) -> None:
        self.modules += [path] * (len(self.nodes) - len(self.modules))

    def constants(self) -> dict[str, NDArray[Any]]:
        """Numbers of the sources that are known: small ones that were computed while reading."""
        found: dict[str, NDArray[Any]] = {}
        for tensor in self._known:
            if tensor.array is not None and tensor.value is not None and tensor.value.node.op in SOURCES:
                found.setdefault(str(tensor.value.node.attribute("name")), tensor.array)
        return found

    def protos(self) -> dict[str, TensorProto]:
        """The stored tensors that the graph reads, by the name of their source."""
        return {
            str(tensor.value.node.attribute("name")): tensor.stored
            for tensor in self._known
            if tensor.stored is not None and tensor.value is not None and tensor.value.node.op in SOURCES
        }

    def others(self) -> dict[str, list[TensorType]]:
        """Types of the stored buffers and constants; parameters that nothing reads are neither."""
        found: dict[str, list[TensorType]] = {"buffers": [], "constants": []}
        for tensor in {id(tensor): tensor for tensor in self._known}.values():
            kind = self._kind(tensor)
            if tensor.stored is not None and kind != "parameter":
                found[f"{kind}s"].append(tensor.type)
        return found

    def notes(self) -> tuple[str, ...]:
        """Why the module that was exported may have other parameters than the graph."""
        numbered = [tensor for tensor in self._known if FOLDED.fullmatch(tensor.name) and tensor.stored is not None]
        numbered = [tensor for tensor in numbered if tensor.type.dtype in FLOATS and tensor.type.elements > 1]
        names = dict.fromkeys(tensor.name for tensor in numbered if self._kind(tensor) == "constant")
        return self.written.notes(list(names))

    def _kind(self, tensor: Tensor) -> str:
        """``parameter``, ``buffer`` or ``constant``."""
        if tensor.value is not None and tensor.value.node.op in SOURCES:
            return tensor.value.node.op
        return tensor.role()

    # -- names --------------------------------------------------------------------------------------------------------

    def _stored(self, graph: GraphProto, names: dict[str, Tensor]) -> None:
        """What the file stores: weights as sources with a type, small integers as numbers."""
        for proto in graph.initializer:
            names[proto.name] = self._proto(proto.name, proto, weight=True)
            names[proto.name].kind = self.written.kinds.get(proto.name)
            self._known.append(names[proto.name])
        for name, (source, transposed) in self.written.copies.items():
            if name in names:
                names[name] = self._copy(name, source, transposed, names)
        for sparse in graph.sparse_initializer:
            dense = self._proto(sparse.values.name, sparse.values, weight=True)
            type = dense.type.with_shape(*(int(size) for size in sparse.dims))
            names[sparse.values.name] = Tensor(sparse.values.name, type, weight=True)

    def _copy(self, name: str, source: str, transposed: bool, names: Mapping[str, Tensor]) -> Tensor:
        """A stored tensor that has the elements of another one: that one, or its transpose."""
        copy = names[name]
        kept = names.get(source) or self._first.setdefault((source, copy.type), copy)
        if kept is copy or copy.type.dtype != kept.type.dtype:
            return copy
        if transposed and kept.type.shape[::-1] == copy.type.shape:
            return Tensor.of_value(name, views.t(self.nodes, kept.of(self.nodes, "parameter")))
        return kept if kept.type == copy.type else copy

    def _own(self, name: str, equal: Tensor) -> Tensor:
        """A parameter or buffer of the module that the file stores under the name of an equal one."""
        if name not in self._owned:
            self._owned[name] = Tensor(
                name, equal.type, stored=equal.stored, weight=GENERATED.fullmatch(name) is None,
                kind=self.written.kinds.get(name),
            )  # fmt: skip
            self._known.append(self._owned[name])
        own = self._owned[name]
        return own if own.type == equal.type else equal

    def _inputs(self, node: NodeProto, names: dict[str, Tensor]) -> list[Tensor | None]:
        """What a node reads, as the module had it."""
        found = [self._find(names, name) if name else None for name in node.input]
        output = node.output[0] if node.output else ""
        for index, given in enumerate(found):
            owner = self.written.owners.get((output, index))
            if owner is not None and given is not None and given.stored is not None:
                found[index] = self._own(owner, given)
        name, elements = self.written.removed.get((output, len(found)), ("", 0))
        if name and found[-1] is not None:
            type = found[-1].type.with_shape(elements)
            found.append(self._owned.setdefault(name, Tensor(name, type, weight=True, kind="parameter")))
        return found

    def _proto(self, name: str, proto: TensorProto, *, weight: bool) -> Tensor:
        try:
            made = Tensor.of_proto(name, proto, weight=weight)
        except (UserError, ValueError, TypeError) as problem:
            raise InputFileError(self.path, f"tensor {shorten(name)!r}: {shorten(str(problem), 300)}") from None
        return made

    def _find(self, names: dict[str, Tensor], name: str) -> Tensor:
        if name not in names:
            raise InputFileError(self.path, f"{shorten(name)!r} is read before it is made", hint="sort its nodes")
        return names[name]

    def _output(self, names: dict[str, Tensor], name: str) -> Value:
        try:
            return self._find(names, name).of(self.nodes)
        except ValueError as problem:
            raise InputFileError(self.path, f"output {shorten(name)!r}: {problem}") from None

    # -- nodes --------------------------------------------------------------------------------------------------------

    def _node(self, node: NodeProto, names: dict[str, Tensor]) -> None:
        domain = "" if node.domain in STANDARD else node.domain
        inputs = self._inputs(node, names)
        attributes = {a.name: _attribute(a) for a in node.attribute if not a.HasField("g") and not a.graphs}
        version = self._versions.get(domain, 1)
        call = OnnxCall(self.nodes, node.op_type, version, inputs, attributes, list(node.output))
        results = self._results(call, node, domain, names)
        for name, result in zip(node.output, results, strict=False):
            if name and result is not None:
                if name in names:
                    raise ValueError(f"{shorten(name)!r} is made twice")
                names[name] = _tensor(name, result)
                self._known.append(names[name])
        for name in node.output:
            if name and name not in names:
                raise ValueError(f"its output {shorten(name)!r} cannot be computed")

    def _results(self, call: OnnxCall, node: NodeProto, domain: str, names: dict[str, Tensor]) -> list[Any]:
        if domain == "" and node.op_type == "Constant":
            return [self._constant(node, call)]
        if domain == "" and node.op_type == "If":
            taken = self._branch(call, node, names)
            if taken is not None:
                return taken
        arrays = [None if given is None else given.array for given in call.inputs]
        unknown = [given for given in call.inputs if given is not None and given.array is None]
        if domain == "" and arrays and not unknown:
            known = fold(node.op_type, arrays, call.attributes)
            if known is not None:
                return [known]
        found = ROWS.get((domain, node.op_type))
        result = None if found is None else found(call)
        if result is None:
            outer = sorted(name for graph in _graphs(node) for name in captured(graph))
            read = [self._find(names, name) for name in outer]
            return opaque(call, node, self._declared, self.dims, read)
        return list(result) if isinstance(result, (tuple, list)) else [result]

    def _constant(self, node: NodeProto, call: OnnxCall) -> Any:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                return self._proto(node.output[0], attribute.t, weight=False)
        for name, dtype in (("value_float", np.float32), ("value_floats", np.float32), ("value_int", np.int64),
                            ("value_ints", np.int64)):  # fmt: skip
            if name in call.attributes:
                return np.array(call.attributes[name], dtype=dtype)
        raise ValueError("a constant of this form cannot be read")

    def _branch(self, call: OnnxCall, node: NodeProto, names: dict[str, Tensor]) -> list[Any] | None:
        """The outputs of the branch that is taken, where the condition is known."""
        condition = call.tensor(0).array
        if condition is None:
            return None
        wanted = "then_branch" if bool(condition.reshape(-1)[0]) else "else_branch"
        graph = next((attribute.g for attribute in node.attribute if attribute.name == wanted), None)
        if graph is None:
            raise ValueError(f"it has no {wanted}")
        inner = dict(names)
        self._stored(graph, inner)
        self._graph(graph, inner)
        return [self._find(inner, value.name) for value in graph.output]


def _given(name: str, names: Mapping[str, Tensor]) -> str:
    """An input of a node with its type: ``x fp32[4, 4]``."""
    found = names.get(name)
    if found is None:
        return shorten(name, 40) or "nothing"
    if found.parts is not None:
        return f"{shorten(name, 40)}, a sequence of {len(found.parts)}"
    return f"{shorten(name, 40)} {found.type.dtype}{list(found.type.shape)}"


def _tensor(name: str, result: Any) -> Tensor:
    if isinstance(result, Tensor):
        return result
    if isinstance(result, Value):
        return Tensor.of_value(name, result)
    return Tensor.known(name, np.asarray(result))


def _graphs(node: NodeProto) -> Iterable[GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _attribute(proto: Any) -> Any:
    """An attribute as a Python value; tensors as arrays."""
    from onnx import helper

    given = helper.get_attribute_value(proto)
    if isinstance(given, bytes):
        return given.decode(errors="replace")
    if proto.HasField("t"):
        return read_array(given)
    if isinstance(given, (int, float)):
        return given
    items = list(given) if not hasattr(given, "DESCRIPTOR") else given
    if isinstance(items, list) and items and isinstance(items[0], bytes):
        return [item.decode(errors="replace") for item in items]
    return items


def module_path(node: NodeProto) -> str:
    """Path of the module that a node came from, as far as the exporter has written it down."""
    for entry in node.metadata_props:
        if entry.key == "pkg.torch.onnx.name_scopes":
            try:
                scopes = ast.literal_eval(entry.value)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                break
            if isinstance(scopes, list) and len(scopes) > 1 and all(isinstance(scope, str) for scope in scopes):
                return str(scopes[-2])
    if node.name.startswith("/"):
        return ".".join(node.name.split("/")[1:-1])
    return ""
