"""Run of the graph of an ONNX file in PyTorch with fake tensors, so that the recorder sees its operators.

Small integer computations that exporters leave in a graph (shapes, indices) run on real tensors meanwhile.
"""

from __future__ import annotations

import ast
import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from steptime.captured import torch_parts as parts
from steptime.captured.graph.program import Attribute, Call, TensorType, Value, contiguous_strides
from steptime.captured.onnx import elementwise, layers, products, shapes  # noqa: F401  (they enter rows)
from steptime.captured.onnx.bodies import BODIES
from steptime.captured.onnx.call import ROWS, OnnxCall, outer_names, plain, real, types_of_opaque
from steptime.captured.onnx.load import MAX_NODES
from steptime.captured.onnx.tensor import FOLDED, GENERATED, MAX_FOLDED_ELEMENTS, Dims, Tensor, flat, read_array
from steptime.captured.onnx.weights import written
from steptime.captured.record.recorder import Paths, Recorder
from steptime.captured.record.results import fresh
from steptime.captured.record.values import TORCH_DTYPES, Signature, dtype_name, type_of
from steptime.errors import InputFileError, UserError, shorten
from steptime.model.spec import FLOATS

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto

FOLDS: Final = frozenset({
    "Add", "Sub", "Mul", "Div", "Neg", "Mod", "Abs", "Sqrt", "Pow", "Exp", "Floor", "Ceil", "Min", "Max", "Reciprocal",
    "Log", "Sin", "Cos", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Not", "Where",
    "Gather", "Concat", "Unsqueeze", "Squeeze", "Slice", "Reshape", "Range", "Flatten", "Transpose", "Expand", "Tile",
    "CumSum", "ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceMean", "Cast", "CastLike",
})  # fmt: skip
"""Operators that are computed on real tensors if all their numbers are known and the result is small."""

STANDARD: Final = ("", "ai.onnx")
"""Names of the domain of the standard operators."""


def result_elements(op: str, arrays: Sequence[torch.Tensor]) -> int:
    """Upper bound on the elements of the result of an operator on known arrays."""
    sizes = [max(array.numel(), 1) for array in arrays]
    if op in ("Expand", "Tile"):
        return sizes[0] * math.prod(max(int(number), 1) for number in flat(arrays[1]))
    if op == "Range":
        start, limit, delta = (float(flat(array)[0]) for array in arrays)
        return int(abs((limit - start) / delta)) + 1 if delta else MAX_FOLDED_ELEMENTS + 1
    if op == "Gather":
        return sizes[0] * sizes[1]
    if op == "Concat":
        return sum(sizes)
    rank = max(array.dim() for array in arrays)
    shape = [max((a.shape[-d] for a in arrays if a.dim() >= d), default=1) for d in range(1, rank + 1)]
    return max(math.prod(shape), *sizes)


class FileRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Recorder of the operators of a file, including operators that PyTorch lacks."""

    def source(self, tensor: torch.Tensor, kind: Any, name: str) -> int:
        """Record a tensor from before the step; in the graph, constants are distinct from buffers."""
        number = self.name(tensor, "buffer" if kind == "constant" else kind, name)
        held = self._held[number]
        if kind == "constant" and held.layout is not None:
            held.content = self.nodes.source(kind, name, self._type(tensor, held.layout))
            held.views = {held.layout: held.content}
        return number

    def value(self, tensor: torch.Tensor) -> Value:
        """Value of a tensor in the graph."""
        return self._read(tensor)[0]

    def opaque(
        self, op: str, inputs: Mapping[str, torch.Tensor], attributes: Mapping[str, Attribute], types: Sequence[Any]
    ) -> list[torch.Tensor]:
        """Record an operator of which only the result types are known, and make its results."""
        made = [_fresh(self, type) for type in types]
        read = [(name, *self._read(tensor)) for name, tensor in inputs.items()]
        known = Signature(None, op, (), (), False, False, False, False, False, False)
        self._record(known, self._paths.current(backward=False), read, list(attributes.items()), made, (), {}, 0)
        return made


def _fresh(recorder: Recorder, type: TensorType) -> torch.Tensor:
    with parts.DisableTorchFunction():
        made: torch.Tensor = fresh(recorder.fakes, type.shape, contiguous_strides(type.shape), TORCH_DTYPES[type.dtype])
    return made


def scalar(recorder: Recorder) -> torch.Tensor:
    """A number that is not recorded."""
    return _fresh(recorder, TensorType((), "fp32"))


class _Opaque(torch.autograd.Function):
    """An operator without a derivative; its backward pass raises an error."""

    @staticmethod
    def forward(ctx: Any, make: Any, op: str, *_given: torch.Tensor) -> Any:
        """The results that ``make`` records."""
        ctx.op = op
        return tuple(make())

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        """Raise an error, since the gradient is unknown."""
        hint = "give --inference, in Python training=False"
        raise UserError(f"the gradient of the operator {ctx.op!r} is not known", hint=hint)


class Ones(torch.autograd.Function):
    """Root of the backward pass that sends ones into tensors, like their sum, without keeping them alive."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, *tensors: torch.Tensor) -> torch.Tensor:
        """The root, which is not recorded."""
        ctx.types = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return scalar(recorder)

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        """Gradients of ones for each tensor."""
        return None, *(torch.ones(shape, dtype=dtype) for shape, dtype in ctx.types)


class Reader:
    """Runs one model under one recorder."""

    def __init__(
        self, path: str, model: ModelProto, dims: Dims, paths: Paths, recorder: FileRecorder, *, training: bool
    ) -> None:
        self.path = path
        self.dims = dims
        self.recorder = recorder
        self.written = written(model.graph)
        self.parameters: dict[str, tuple[torch.Tensor, int]] = {}
        """Name -> parameter that the graph reads, and the number of its storage."""
        self._sources: list[torch.Tensor] = []
        """Inputs and stored tensors, which live until the end."""
        self._paths, self._training, self.values = paths, training, recorder.fakes.values
        self._model = model
        self._versions = {"" if o.domain in STANDARD else o.domain: int(o.version) for o in model.opset_import}
        self.declared: dict[str, TypeProto] = {}
        self.trials: dict[tuple[str, ...], tuple[Any, Any] | None] = {}
        """Outputs of a node and name of a sub-graph -> FLOPs and bytes of the sub-graph; None: it cannot be read."""
        self._count = 0
        self._known: list[Tensor] = []
        self._owned: dict[str, Tensor] = {}
        """Own name -> tensor that the file stores under the name of an equal one."""
        self._first: dict[tuple[str, TensorType], Tensor] = {}
        """(source, type) -> first copy of a source tensor that is not stored itself."""

    def run(self) -> list[torch.Tensor]:
        """The outputs of the graph."""
        graph = self._model.graph
        names: dict[str, Tensor] = {}
        self._stored(graph, names)
        types = [(value.name, self.dims.input_type(value)) for value in graph.input if value.name not in names]
        self.dims.check()
        for name, type in types:
            assert type is not None
            names[name] = Tensor(name, type.shape, type.dtype, kind="input")
            self.live(names[name])
        self._graph(graph, names)
        if not graph.output:
            raise InputFileError(self.path, "its graph has no outputs")
        return [self._output(names, value.name) for value in graph.output]

    def live(self, given: Tensor, kind: str = "constant") -> torch.Tensor:
        """Fake tensor of a name; a stored tensor becomes a source of the graph at its first use."""
        if given.parts is not None:
            raise ValueError(f"{given.name!r} is a sequence, where a tensor is needed")
        if given.value is None:
            given.kind = given.role(kind)
            made = _fresh(self.recorder, given.type)
            number = self.recorder.source(made, given.kind, given.name)
            if given.kind == "parameter":
                self.parameters[given.name] = made.requires_grad_(self._training and given.dtype in FLOATS), number
            self._sources.append(made)
            given.value = made
        return given.value

    def _graph(self, graph: GraphProto, names: dict[str, Tensor]) -> None:
        self.declared |= {value.name: value.type for value in (*graph.value_info, *graph.output)}
        nodes = _needed(graph)
        left = Counter(name for node in nodes for name in _read(node))
        left.update(value.name for value in graph.output)
        for node in nodes:
            self._count += 1
            if self._count > MAX_NODES or len(self.recorder.calls) > 4 * MAX_NODES:
                raise InputFileError(self.path, f"more than {MAX_NODES} nodes")
            try:
                self.values.where = f"node {shorten(node.name or node.op_type)!r}"
                with self._paths.inside_of(module_path(node)):
                    self._node(node, names, left)
            except InputFileError:
                raise
            except (UserError, ValueError) as problem:
                raise self._refused(node, names, shorten(str(problem), 300) or "cannot be read") from None
            except (TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError) as problem:
                first = next(iter(str(problem).splitlines()), "")
                what = f"{type(problem).__name__}: {shorten(first, 200)}"
                raise self._refused(node, names, f"its inputs or attributes do not fit it ({what})") from None
            left.subtract(_read(node))
            for name in dict.fromkeys(_read(node)):
                if not left[name]:  # no later reader: free it
                    names.pop(name, None)

    def _refused(self, node: NodeProto, names: Mapping[str, Tensor], text: str) -> InputFileError:
        """Error for a node, with its inputs and attributes."""
        inputs = ", ".join(_given(name, names) for name in node.input) or "none"
        attributes = ", ".join(attribute.name for attribute in node.attribute) or "none"
        hint = f"inputs: {shorten(inputs, 300)}; attributes: {shorten(attributes)}"
        return InputFileError(self.path, f"node {shorten(node.name)!r} ({node.op_type}): {text}", hint=hint)

    # -- results ------------------------------------------------------------------------------------------------------

    def constants(self) -> dict[str, torch.Tensor]:
        """Source -> known numbers: small ones that were computed while reading."""
        return {one.name: one.array for one in self._known if one.array is not None and one.value is not None}

    def protos(self) -> dict[str, TensorProto]:
        """Source -> stored tensor that the graph reads."""
        return {one.name: one.stored for one in self._known if one.stored is not None and one.value is not None}

    def stored(self) -> dict[str, list[TensorType]]:
        """Types of the parameters that the graph reads, and of all stored buffers and constants."""
        types = [type_of(one) for one, _ in self.parameters.values()]
        found: dict[str, list[TensorType]] = {"parameters": types, "buffers": [], "constants": []}
        for tensor in {id(tensor): tensor for tensor in self._known}.values():
            if tensor.stored is not None and tensor.role() != "parameter":
                found[f"{tensor.role()}s"].append(tensor.type)
        return found

    def notes(self) -> tuple[str, ...]:
        """Reasons why the exported module may have other parameters than the graph."""
        numbered = [tensor for tensor in self._known if FOLDED.fullmatch(tensor.name) and tensor.stored is not None]
        numbered = [tensor for tensor in numbered if tensor.dtype in FLOATS and tensor.type.elements > 1]
        return self.written.notes(list(dict.fromkeys(one.name for one in numbered if one.role() == "constant")))

    # -- names --------------------------------------------------------------------------------------------------------

    def _stored(self, graph: GraphProto, names: dict[str, Tensor]) -> None:
        """Add the stored tensors of a graph to its names: weights with types only, small integers with numbers."""
        for proto in graph.initializer:
            names[proto.name] = self._proto(proto.name, proto, weight=True)
            names[proto.name].kind = self.written.kinds.get(proto.name)
            self._known.append(names[proto.name])
        for name, (source, transposed) in self.written.copies.items():
            if name in names:
                names[name] = self._copy(name, source, transposed, names)
        for sparse in graph.sparse_initializer:
            name, dense = sparse.values.name, self._proto(sparse.values.name, sparse.values, weight=True)
            names[name] = Tensor(name, tuple(int(size) for size in sparse.dims), dense.dtype, weight=True)

    def _copy(self, name: str, source: str, transposed: bool, names: Mapping[str, Tensor]) -> Tensor:
        """Original of a stored tensor that is a copy: the original itself, or its transpose."""
        copy = names[name]
        kept = names.get(source) or self._first.setdefault((source, copy.type), copy)
        if kept is copy or copy.dtype != kept.dtype:
            return copy
        if transposed and kept.shape[::-1] == copy.shape:
            return Tensor(name, copy.shape, copy.dtype, value=self.live(kept, "parameter").t())
        return kept if kept.shape == copy.shape else copy

    def _own(self, name: str, equal: Tensor) -> Tensor:
        """Parameter or buffer of the module that the file stores under the name of an equal one."""
        if name not in self._owned:
            self._owned[name] = Tensor(
                name, equal.shape, equal.dtype, stored=equal.stored, weight=GENERATED.fullmatch(name) is None,
                kind=self.written.kinds.get(name),
            )  # fmt: skip
            self._known.append(self._owned[name])
        own = self._owned[name]
        return own if own.type == equal.type else equal

    def _inputs(self, node: NodeProto, names: dict[str, Tensor]) -> list[Tensor | None]:
        """Inputs of a node, with the tensors of the original module."""
        found = [self._find(names, name) if name else None for name in node.input]
        output = node.output[0] if node.output else ""
        for index, given in enumerate(found):
            owner = self.written.owners.get((output, index))
            if owner is not None and given is not None and given.stored is not None:
                found[index] = self._own(owner, given)
        name, elements = self.written.removed.get((output, len(found)), ("", 0))
        if name and found[-1] is not None:
            zeros = Tensor(name, (elements,), found[-1].dtype, weight=True, kind="parameter")
            found.append(self._owned.setdefault(name, zeros))
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

    def _output(self, names: dict[str, Tensor], name: str) -> torch.Tensor:
        try:
            return self.live(self._find(names, name))
        except ValueError as problem:
            raise InputFileError(self.path, f"output {shorten(name)!r}: {problem}") from None

    # -- nodes --------------------------------------------------------------------------------------------------------

    def _node(self, node: NodeProto, names: dict[str, Tensor], read: Mapping[str, int]) -> None:
        domain = "" if node.domain in STANDARD else node.domain
        inputs = self._inputs(node, names)
        attributes = {a.name: _attribute(a) for a in node.attribute if not a.HasField("g") and not a.graphs}
        version, outputs = self._versions.get(domain, 1), [name if read[name] else "" for name in node.output]
        call = OnnxCall(node.op_type, version, inputs, attributes, outputs, self.live)
        results = self._results(call, node, domain, names)
        for name, result in zip(node.output, results, strict=False):
            if name and result is not None:
                if name in names:
                    raise ValueError(f"{shorten(name)!r} is made twice")
                names[name] = _tensor(name, result)
                if names[name].array is not None:
                    self._known.append(names[name])
        for name in outputs:
            if name and name not in names:
                raise ValueError(f"its output {shorten(name)!r} cannot be computed")

    def _results(self, call: OnnxCall, node: NodeProto, domain: str, names: dict[str, Tensor]) -> list[Any]:
        if domain == "" and node.op_type == "Constant":
            return [self._constant(node, call)]
        through = BODIES.get(node.op_type) if domain == "" else None
        if through is not None:
            return through(self, call, node, names) or self._opaque(call, node, names)
        found = ROWS.get((domain, node.op_type))
        result = None if found is None else _folded(call, found) if domain == "" else None
        if result is None and found is not None:
            with contextlib.suppress(NotImplementedError):  # no kernel for this element type
                result = found(call)
        if result is None:
            return self._opaque(call, node, names)
        return list(result) if isinstance(result, (tuple, list)) else [result]

    def _opaque(self, call: OnnxCall, node: NodeProto, names: dict[str, Tensor]) -> list[Any]:
        """Outputs of an opaque node, which reads its inputs and the outer names of its sub-graphs."""
        outer = [self._find(names, name) for name in sorted(_outer(node))]
        types = types_of_opaque(call, node, self.declared, self.dims)
        given = {f"input{n}": self.live(one) for n, one in enumerate([*call.inputs, *outer]) if one is not None}
        op = f"onnx.{node.domain}::{node.op_type}" if node.domain else f"onnx::{node.op_type}"
        wanted = [type for type in types if type is not None]
        apply: Any = _Opaque.apply
        make = partial(self.recorder.opaque, op, given, plain(call.attributes), wanted)
        made = iter(apply(make, op, *given.values()))
        return [None if type is None else next(made) for type in types]

    def _constant(self, node: NodeProto, call: OnnxCall) -> Any:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                return self._proto(node.output[0], attribute.t, weight=False)
        for name, dtype in (("value_float", torch.float32), ("value_floats", torch.float32),
                            ("value_int", torch.int64), ("value_ints", torch.int64)):  # fmt: skip
            if name in call.attributes:
                return real(call.attributes[name], dtype)
        raise ValueError("a constant of this form cannot be read")

    # -- sub-graphs ---------------------------------------------------------------------------------------------------

    def body(self, graph: GraphProto, names: Mapping[str, Tensor]) -> Callable[..., list[Tensor]]:
        """A sub-graph as a function of its inputs, which are tensors of names or of PyTorch."""
        outer = dict(names)
        self._stored(graph, outer)

        def run(*given: Any) -> list[Tensor]:
            inner, where = dict(outer), self.values.where
            for value, one in zip(graph.input, given, strict=True):
                inner[value.name] = _tensor(value.name, one)
            self._graph(graph, inner)
            self.values.where = where
            return [self._find(inner, value.name) for value in graph.output]

        return run

    def tried(self, graph: GraphProto, names: Mapping[str, Tensor], given: Sequence[Tensor] = ()) -> Sequence[Call]:
        """Calls of a sub-graph in a trial run that leaves no trace.

        Raises:
            UserError: the sub-graph cannot be read.
            ValueError: it takes other inputs.
        """
        other, assumed = copy(self), dict(self.values.assumed)
        other.recorder = FileRecorder(self._paths, self.recorder.fakes)
        other.parameters, other._owned, other._first, other.declared = {}, {}, {}, dict(self.declared)
        other._sources, other._known = [], []
        outside = {name: _apart(names[name]) for name in outer_names(graph) if name in names}
        try:
            with parts.without_modes(), self.recorder.fakes, other.recorder, torch.no_grad():
                other.body(graph, outside)(*map(_apart, given))
        finally:
            self._count, self.values.assumed = other._count, assumed
        return other.recorder.calls


def _apart(given: Tensor) -> Tensor:
    """Copy of a tensor for another recorder."""
    return replace(given, value=None, parts=given.parts and [_apart(one) for one in given.parts])


def _folded(call: OnnxCall, row: Any) -> Any:
    """Result on known numbers; None if some are unknown, or the result is large."""
    given = [one for one in call.inputs[: 1 if call.op == "CastLike" else None] if one is not None]
    known = [one.array for one in given if one.array is not None]
    if call.op not in FOLDS or not known or len(known) < len(given):
        return None
    if result_elements(call.op, known) > MAX_FOLDED_ELEMENTS:
        return None
    call.folding = True
    try:
        with parts.without_modes(), torch.no_grad():
            return row(call)
    except NotImplementedError:  # no kernel for this element type
        return None
    finally:
        call.folding = False


def _needed(graph: GraphProto) -> list[NodeProto]:
    """The nodes that the outputs of a graph need, in order."""
    read, kept = {value.name for value in graph.output}, []
    for node in reversed(graph.node):
        if not read.isdisjoint(node.output):
            kept.append(node)
            read.update(_read(node))
    return kept[::-1]


def _read(node: NodeProto) -> list[str]:
    """Names that a node and its sub-graphs read."""
    return [*(name for name in node.input if name), *_outer(node)]


def _outer(node: NodeProto) -> set[str]:
    """Names that the sub-graphs of a node read from outside."""
    return {name for graph in _graphs(node) for name in outer_names(graph)}


def _given(name: str, names: Mapping[str, Tensor]) -> str:
    """An input of a node with its type: ``x fp32[4, 4]``."""
    found = names.get(name)
    if found is None:
        return shorten(name, 40) or "nothing"
    if found.parts is not None:
        return f"{shorten(name, 40)}, a sequence of {len(found.parts)}"
    return f"{shorten(name, 40)} {found.dtype}{list(found.shape)}"


def _tensor(name: str, result: Any) -> Tensor:
    """Result of a row under the name of an output."""
    if isinstance(result, Tensor):
        return result
    shape, dtype = tuple(result.shape), dtype_name(result.dtype)
    known = type(result) is torch.Tensor
    return Tensor(name, shape, dtype, **{"array" if known else "value": result})


def _graphs(node: NodeProto) -> Iterator[GraphProto]:
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
    """Path of the original module of a node; empty if the exporter has not recorded it."""
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
