"""Reading an ONNX file into a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptime.captured.graph.node import Graph, Node, Nodes
from steptime.captured.graph.types import TensorType
from steptime.captured.onnx.dims import Dims
from steptime.captured.onnx.load import load_model

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
        source=source, stored=stored, notes=reader.notes(),
    )  # fmt: skip


def _total(types: Sequence[TensorType]) -> Stored:
    elements, size_bytes = sum(type.elements for type in types), sum(type.size_bytes for type in types)
    return Stored(tensors=len(types), elements=elements, size_bytes=size_bytes)
