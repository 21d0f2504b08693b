"""An ONNX file as a graph, and as the program of a step: forward, and for training the derived backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptime.captured.autodiff import gradients
from steptime.captured.graph.program import Graph, Node, Nodes, Program, TensorType
from steptime.captured.graph.schedule import program_of
from steptime.captured.onnx.load import load_model, stored_array
from steptime.captured.onnx.tensor import Dims
from steptime.errors import InputFileError
from steptime.model.spec import FLOATS

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import TensorProto


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Tensors of one kind that a file stores."""

    tensors: int
    elements: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxModel:
    """A model read from an ONNX file."""

    name: str
    graph: Graph
    nodes: Nodes
    """The table of its nodes, for what is derived from it."""
    modules: tuple[str, ...]
    """Module path of each node, by the number of the node; empty where the exporter has not written it."""
    constants: Mapping[str, NDArray[Any]]
    """Numbers of constants that were known while reading, by the name of the source."""
    source: str
    """What made the file, for provenance."""
    stored: Mapping[str, Stored]
    """What is stored as ``parameters``, ``buffers`` and ``constants``; of the parameters those that the graph reads."""
    notes: tuple[str, ...]
    """Why the module that was exported may have other parameters."""
    outputs: tuple[str, ...] = ()
    """Names of the outputs in the file."""
    protos: Mapping[str, TensorProto] = field(default_factory=dict, repr=False)
    """The stored tensors by the name of their source."""

    def weights(self, path: Path) -> dict[str, NDArray[Any]]:
        """Contents of the stored tensors by the name of their source.

        Raises:
            InputFileError: their data are in a file outside the folder, or missing.
        """
        return {name: stored_array(path, proto) for name, proto in self.protos.items()}

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters that the graph reads, shared ones once."""
        return sum(node.outputs[0].elements for node in self.graph.sources("parameter"))

    def module(self, node: Node) -> str:
        """Module path of a node."""
        return self.modules[node.number] if node.number < len(self.modules) else ""


def read_onnx(path: Path | str, *, dims: Mapping[str, int] | None = None) -> OnnxModel:
    """Read an ONNX file.

    Every operator that has a row in the table becomes the ATen operators that PyTorch runs for it; another one stays
    as ``onnx::Name`` with its output types. Sums on shapes are done while reading. Stored tensors become sources with
    their types only: parameters, buffers and constants of the module, as far as the exporter has written it.

    Args:
        path: the file.
        dims: sizes for what the file leaves open, by symbol, for instance ``{"batch": 8}``; a size without a name is
            called ``input.dim``, for instance ``pixels.0``.

    Raises:
        InputFileError: the file is damaged, too large, hostile, or has an operator whose output types are unknown.
        UserError: sizes are open and not given, or the ``onnx`` library is not installed.
    """
    path = Path(path)
    model = load_model(path)
    from steptime.captured.onnx.reader import Reader

    reader = Reader(str(path), model, Dims(str(path), dims))
    outputs = reader.read()
    source = f"{model.producer_name} {model.producer_version}".strip()
    graph = Graph(outputs)
    types = {"parameters": [node.outputs[0] for node in graph.sources("parameter")], **reader.others()}
    stored = {kind: _total(found) for kind, found in types.items()}
    return OnnxModel(
        name=path.stem, graph=graph, nodes=reader.nodes, modules=tuple(reader.modules), constants=reader.constants(),
        source=source, stored=stored, notes=reader.notes(), outputs=tuple(value.name for value in model.graph.output),
        protos=reader.protos(),
    )  # fmt: skip


def _total(types: Sequence[TensorType]) -> Stored:
    elements, size_bytes = sum(type.elements for type in types), sum(type.size_bytes for type in types)
    return Stored(tensors=len(types), elements=elements, size_bytes=size_bytes)


def program_of_file(path: Path | str, *, dims: Mapping[str, int] | None = None, training: bool = True) -> Program:
    """The forward pass of an ONNX file, followed in training by the backward pass that follows from it.

    The file says nothing of a loss or an optimiser: gradients of ones flow into every floating-point output, as from
    the sum of them, and there is no optimiser phase. Layers are as the file has them; a file exported for inference
    normalises by its running statistics and drops nothing out.

    Args:
        path: the file.
        dims: sizes for what the file leaves open, by symbol.
        training: with the backward pass.

    Raises:
        InputFileError: the file cannot be read; with ``training``, it has no weights.
        UserError: sizes are missing; with ``training``, the gradient of an operator is not known.
    """
    return program_of_model(read_onnx(path, dims=dims), str(path), training=training)


def program_of_model(model: OnnxModel, path: str, *, training: bool) -> Program:
    """The same for a model that was read."""
    source = f"ONNX file {Path(path).name}" + (f", exported by {model.source}" if model.source else "")
    first = next((node.outputs[0].shape for node in model.graph.sources("input") if node.outputs[0].rank), ())
    batch = first[0] if first else None
    if not training:
        return program_of(model.graph, name=model.name, module=model.module, source=source, batch=batch)
    if not model.graph.sources("parameter"):
        hint = "give --inference, in Python training=False"
        raise InputFileError(path, "it has no weights, so there is nothing to train", hint=hint)
    if not any(value.type.dtype in FLOATS for value in model.graph.outputs):
        raise InputFileError(path, "none of its outputs is floating-point, so nothing flows back")
    derived = gradients(model.nodes, model.graph)
    return program_of(
        model.graph, name=model.name, source=source, batch=batch,
        module=lambda node: model.module(derived.origins.get(node, node)),
        backward=derived.backward, gradients=derived.wanted,
    )  # fmt: skip
