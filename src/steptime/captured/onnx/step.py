"""An ONNX file as the program of a step: PyTorch's operators of its forward pass and, in training, backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptime.captured.graph.program import Graph, Node, Nodes, Parameter, Program, TensorType
from steptime.captured.onnx.load import load_model, stored_array
from steptime.captured.onnx.tensor import Dims
from steptime.errors import InputFileError
from steptime.registry import require

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import TensorProto
    from torch import Tensor

    from steptime.captured.onnx.reader import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Tensors of one kind that a file stores."""

    tensors: int
    elements: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class OnnxModel:
    """A model read from an ONNX file."""

    program: Program
    """The recorded forward pass, and in training the backward pass."""
    graph: Graph
    """The forward pass."""
    nodes: Nodes
    """Table of the nodes of the graph, for graphs that are derived from it."""
    constants: Mapping[str, Tensor]
    """Source -> numbers of a constant that was known while reading."""
    stored: Mapping[str, Stored]
    """Stored ``parameters`` (only those that the graph reads), ``buffers`` and ``constants``."""
    notes: tuple[str, ...]
    """Reasons why the exported module may have other parameters."""
    outputs: tuple[str, ...] = ()
    """Names of the outputs in the file."""
    protos: Mapping[str, TensorProto] = field(default_factory=dict, repr=False)
    """Source -> stored tensor."""

    def weights(self, path: Path) -> dict[str, NDArray[Any]]:
        """Source -> contents of a stored tensor.

        Raises:
            InputFileError: data are in a file outside the folder, or missing.
        """
        return {name: stored_array(path, proto) for name, proto in self.protos.items()}

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters that the graph reads, shared ones once."""
        return self.program.parameter_count

    @cached_property
    def modules(self) -> Mapping[Node, str]:
        """Module path of each node; empty if the exporter has not recorded it."""
        return {call.node: call.module for call in self.program.calls}


def read_onnx(path: Path | str, *, dims: Mapping[str, int] | None = None, training: bool = False) -> OnnxModel:
    """Read an ONNX file.

    Every operator with a row in the table becomes calls of PyTorch, which are recorded; any other stays as
    ``onnx::Name`` with its output types. Computations on shapes are done while reading. Stored tensors become sources
    with types only: parameters, buffers and constants of the module, as far as the exporter has recorded them.

    The file has no loss and no optimiser: in training, gradients of ones flow into every floating-point output, as from
    their sum, and there is no optimiser phase. Layers run in the mode of the file: one exported for inference
    normalises by running statistics and has no dropout.

    Args:
        path: the file.
        dims: open sizes of the file, by symbol, for instance ``{"batch": 8}``; a size without a name is called
            ``input.dim``, for instance ``pixels.0``.
        training: record the backward pass too.

    Raises:
        InputFileError: the file is damaged, too large, hostile, or has an operator whose output types are unknown; with
            ``training``, it has no weights.
        UserError: sizes are open and not given, or the ``onnx`` library or PyTorch is not installed; with
            ``training``, the gradient of an operator is unknown.
    """
    path = Path(path)
    model = load_model(path)
    require("torch", "reading an ONNX file")
    import torch

    from steptime.captured import torch_parts as parts
    from steptime.captured.onnx.reader import FileRecorder, Reader
    from steptime.captured.record.environment import capturing
    from steptime.captured.record.recorder import Paths

    with capturing(torch.nn.Module(), (), name=str(path), training=training) as (_, replaced):
        paths = Paths(torch.nn.Module())
        recorder = FileRecorder(paths, replaced.mode)
        reader = Reader(str(path), model, Dims(str(path), dims), paths, recorder, training=training)
        with paths.watching(), recorder, parts.DisableTorchFunction(), torch.set_grad_enabled(training):
            outputs = reader.run()
            graph = Graph(tuple(recorder.value(output) for output in outputs))
            if training:
                _backward(str(path), reader, outputs)
        producer = f"{model.producer_name} {model.producer_version}".strip()
        batch = next((node.outputs[0].shape[0] for node in graph.sources("input") if node.outputs[0].rank), None)
        program = Program(
            name=path.stem, calls=tuple(recorder.calls), storages=recorder.storages(),
            parameters=tuple(_parameters(reader, training=training)), batch=batch,
            source=f"ONNX file {path.name}" + (f", exported by {producer}" if producer else ""),
            assumed=tuple(recorder.fakes.values.assumed),
        )  # fmt: skip
    return OnnxModel(
        program=program, graph=graph, nodes=recorder.nodes, constants=reader.constants(),
        stored={kind: _total(found) for kind, found in reader.stored().items()}, notes=reader.notes(),
        outputs=tuple(value.name for value in model.graph.output), protos=reader.protos(),
    )  # fmt: skip


def _backward(path: str, reader: Reader, outputs: list[Tensor]) -> None:
    """Run the backward pass from gradients of ones for every floating-point output, and release the outputs."""
    from steptime.captured import torch_parts as parts
    from steptime.captured.onnx.reader import Ones, scalar

    if not reader.parameters:
        hint = "give --inference, in Python training=False"
        raise InputFileError(path, "it has no weights, so there is nothing to train", hint=hint)
    floating = [output for output in outputs if output.is_floating_point()]
    if not floating:
        raise InputFileError(path, "none of its outputs is floating-point, so nothing flows back")
    apply: Any = Ones.apply
    root, seed = apply(reader.recorder, *floating), scalar(reader.recorder)
    outputs.clear()
    floating.clear()
    with reader.recorder.in_phase("backward"):
        if root.requires_grad:
            parts.engine.run_backward((root,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    for name, (weight, _) in reader.parameters.items():
        if weight.grad is not None:
            reader.recorder.name(weight.grad, "gradient", f"{name}.grad")


def _parameters(reader: Reader, *, training: bool) -> list[Parameter]:
    """Weights of the file; without a backward pass, floating-point ones count as trained."""
    from steptime.captured.record.values import dtype_name

    return [
        Parameter(
            name=name, storage=number, elements=weight.numel(), size_bytes=weight.untyped_storage().nbytes(),
            trained=weight.grad is not None if training else weight.is_floating_point(), dtype=dtype_name(weight.dtype),
        )
        for name, (weight, number) in reader.parameters.items()
    ]  # fmt: skip


def _total(types: Sequence[TensorType]) -> Stored:
    elements, size_bytes = sum(type.elements for type in types), sum(type.size_bytes for type in types)
    return Stored(tensors=len(types), elements=elements, size_bytes=size_bytes)


def program_of_file(path: Path | str, *, dims: Mapping[str, int] | None = None, training: bool = True) -> Program:
    """Program of an ONNX file, as by :func:`read_onnx`."""
    return read_onnx(path, dims=dims, training=training).program
