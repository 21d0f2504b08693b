"""Role of stored tensors in the exported module: parameter, buffer or constant, and the name there.

PyTorch's exporters store equal tensors once, fold transposes and casts into copies with generated names, and fold batch
normalisation into the previous convolution. Their metadata undo most of that:

* ``torch.onnx.export(dynamo=True)`` lists the parameters and buffers of the module (``graph_signature``), the sources
  of a folded tensor (``folded_from``), and the arguments of the ATen call behind a node (``fx_node``).
* ``dynamo=False`` keeps the names of the module for tensors that it did not fold, passes a tensor that equals another
  one through an ``Identity`` with its own name, and numbers folded tensors by the operator that reads them
  (``onnx::MatMul_285``), whose name has the path of the module.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from steptime.captured.onnx.tensor import DTYPES, FOLDED, GENERATED
from steptime.errors import shorten
from steptime.model.spec import FLOATS

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto, TensorProto

SIGNATURE: Final = "pkg.torch.export.ExportedProgram.graph_signature"
KIND: Final = "pkg.torch.export.graph_signature.InputSpec.kind"
CALL: Final = "pkg.torch.onnx.fx_node"
FOLDED_FROM: Final = "pkg.onnxscript.optimizer.folded_from"

_KINDS: Final = {"PARAMETER": "parameter", "BUFFER": "buffer", "CONSTANT_TENSOR": "constant"}
_LINE: Final = re.compile(r"^(\w+): (PARAMETER|BUFFER|CONSTANT_TENSOR) target='([^']*)'", re.MULTILINE)
_PRODUCTS: Final = ("MatMul", "Gemm", "Conv", "ConvTranspose")
_CONVOLUTIONS: Final = ("Conv", "ConvTranspose")


@dataclass(slots=True, kw_only=True)
class Written:
    """Metadata of the exporter on the stored tensors of a graph."""

    kinds: dict[str, str] = field(default_factory=dict)
    """Tensor -> ``parameter``, ``buffer`` or ``constant``, as far as the file declares it."""
    copies: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """Stored tensor -> its original, which need not be stored, and True if it is a transpose."""
    parts: dict[str, str] = field(default_factory=dict)
    """Stored tensor -> parameter that it was computed from by operators that need not keep all elements."""
    owners: dict[tuple[str, int], str] = field(default_factory=dict)
    """(first output of a node, number of an input) -> parameter or buffer of the module that this input stands for, if
    the file stores it under the name of an equal one."""
    removed: dict[tuple[str, int], tuple[str, int]] = field(default_factory=dict)
    """(first output of a node, number of an input) -> bias of the module, and its elements, that the exporter has left
    out because it was zero."""
    merged: dict[str, int] = field(default_factory=dict)
    """Parameters of batch normalisations that are folded into a convolution -> elements."""
    made: int = 0
    """Elements of the biases that the folding of batch normalisations added to convolutions."""
    numbered: list[str] = field(default_factory=list)
    """Weights of convolutions that were folded with tensors that the file does not name."""
    lost: tuple[str, ...] = ()
    """Other parameters that the file lists and does not store."""

    def notes(self, folded: Sequence[str]) -> tuple[str, ...]:
        """Reasons why the module may have other parameters; ``folded``: constants with numbered names, no scalars."""
        more = sum(self.merged.values()) - self.made
        parts = [f"{name} from {source}" for name, source in self.parts.items()]
        texts = (
            (list(self.merged), "batch normalisation is folded into convolutions: the module has "
             f"{more:,} more parameters"),
            (self.numbered, "weights of convolutions are folded with what the file does not name, perhaps batch "
             "normalisation: the module may have more parameters"),
            (parts, "computed from parameters by the exporter: as stored, the module's may be larger or smaller"),
            (list(self.lost), "listed as parameters and stored nowhere: unused, second names of shared ones, or of one "
             "of two equal layers"),
            (list(folded), "folded by the exporter and counted as constants, perhaps made from parameters"),
        )  # fmt: skip
        return tuple(f"{text} ({_names(names)})" for names, text in texts if names)


def _names(names: Sequence[str]) -> str:
    """The first names, and the number of others.

    >>> _names(["a", "b", "c", "d"])
    'a, b and 2 more'
    """
    shown = ", ".join(shorten(name, 60) for name in names[:2])
    return f"{shown} and {len(names) - 2} more" if len(names) > 2 else shown


def written(graph: GraphProto) -> Written:
    """Metadata of the exporter; empty for a file without metadata, or with names that are no text."""
    try:
        return _written(graph)
    except TypeError:  # protobuf gives bytes for a name that is no UTF-8
        return Written()


def _written(graph: GraphProto) -> Written:
    stored = {proto.name: proto for proto in graph.initializer}
    values = {value.name: value for value in (*graph.input, *graph.value_info) if value.name in stored}
    short = {found[1]: (_KINDS[found[2]], found[3]) for found in _LINE.finditer(_entry(graph, SIGNATURE))}
    found = Written(kinds={target: kind for kind, target in short.values()})
    found.kinds |= {n: _KINDS[k] for n, value in values.items() if (k := _entry(value, KIND)) in _KINDS}
    if short:
        _listed(found, graph, stored, {n: (stored[n], values.get(n)) for n in stored}, short)
    else:
        _numbered(found, graph, stored)
    return found


# -- files that list the parameters of the module ---------------------------------------------------------------------


def _listed(
    found: Written,
    graph: GraphProto,
    stored: Mapping[str, TensorProto],
    entries: Mapping[str, tuple[Any, Any]],
    short: Mapping[str, tuple[str, str]],
) -> None:
    sources = {name: _sources(*pair) for name, pair in entries.items()}
    targets = {target: kind for kind, target in short.values()}
    for name, made_from in sources.items():
        _folded(found, name, made_from, targets, stored)
    held = {*stored, *(source for made_from in sources.values() for source in made_from)}
    for node in graph.node:
        text = _entry(node, CALL)
        read = [short[word][1] for word in re.findall(r"%(\w+)", text) if word in short]
        missing = [name for name in dict.fromkeys(read) if name not in held]
        known = set(read)
        if missing:
            foreign = {
                number: stands_for
                for number, name in enumerate(node.input)
                if (stands_for := _foreign(name, stored, sources, known, targets))
            }
            found.owners |= _owners(node, foreign, missing)
            _without(found, node, text, [name for name in missing if targets[name] == "parameter"], stored)
    present = held | set(found.owners.values()) | set(found.merged) | {name for name, _ in found.removed.values()}
    found.lost = tuple(name for name, kind in targets.items() if kind == "parameter" and name not in present)


def _folded(
    found: Written,
    name: str,
    made_from: Sequence[str],
    targets: Mapping[str, str],
    stored: Mapping[str, TensorProto],
) -> None:
    """Note kind and original of a folded tensor, from the tensors that it was made from."""
    weights = [source for source in made_from if source in targets]
    kinds = {targets[source] for source in weights}
    if not made_from:
        return
    found.kinds.setdefault(name, next((kind for kind in ("parameter", "buffer") if kind in kinds), "constant"))
    if found.kinds[name] != "parameter":
        return
    source = next(source for source in weights if targets[source] == "parameter")
    if len(made_from) > 1:
        found.parts[name] = source
        return
    dims = tuple(stored[name].dims)
    if source not in stored:
        found.copies[name] = (source, False)
    elif math.prod(dims) == math.prod(stored[source].dims):
        found.copies[name] = (source, len(dims) == 2)
    else:
        found.parts[name] = source


def _foreign(
    name: str,
    stored: Mapping[str, TensorProto],
    sources: Mapping[str, Sequence[str]],
    read: set[str],
    targets: Mapping[str, str],
) -> str:
    """Parameter or buffer behind a stored tensor, if the call that reads it names another one; else empty.

    Tensors that the exporter made of constants alone (ones of a normalisation) stand for no parameter.
    """
    proto = stored.get(name)
    if proto is None or not proto.dims or DTYPES.get(proto.data_type) not in FLOATS:
        return ""
    if read.intersection((name, *sources[name])):
        return ""
    if sources[name]:
        return next((source for source in sources[name] if source in targets), "")
    return "" if GENERATED.fullmatch(name) else name


def _owners(node: NodeProto, foreign: Mapping[int, str], missing: Sequence[str]) -> dict[tuple[str, int], str]:
    """Inputs of a node that stand for parameters and buffers which its call reads and the file does not store.

    Matched by role (``norm1.weight`` for ``norm2.weight``), else all of them in order.

    Args:
        node: the node.
        foreign: number of an input that belongs to another call -> its parameter.
        missing: tensors that the call reads and the file does not store.
    """
    alike = {n: [each for each in missing if _role(each) == _role(other)] for n, other in foreign.items()}
    if node.output and alike and all(len(names) == 1 for names in alike.values()):
        return {(node.output[0], number): names[0] for number, names in alike.items()}
    if len(foreign) == 1 and len(missing) == 2:
        # A linear layer as a product and a sum: the call of both names the weight before the bias.
        missing = missing[:1] if node.op_type in _PRODUCTS else missing[1:]
    if len(foreign) != len(missing) or not node.output:
        return {}
    return {(node.output[0], index): name for index, name in zip(foreign, missing, strict=True)}


def _role(name: str) -> str:
    """Last part of the name of a parameter: ``weight``, ``bias``."""
    return name.rpartition(".")[2]


def _without(
    found: Written, node: NodeProto, text: str, missing: Sequence[str], stored: Mapping[str, TensorProto]
) -> None:
    """Note batch normalisation that is folded into a convolution, and biases that are left out."""
    channels = _channels(node, stored)
    bias = node.input[2] if len(node.input) > 2 else ""
    if not channels:
        return
    if "batch_norm" in text:
        found.merged |= dict.fromkeys(missing, channels)
        found.made += channels if bias in stored and bias not in found.kinds else 0
    elif not bias and len(missing) == 1:
        found.removed[node.output[0], 2] = (missing[0], channels)


def _channels(node: NodeProto, stored: Mapping[str, TensorProto]) -> int:
    """Output channels of a convolution or a linear layer; 0 for other operators, or if its weight is not stored."""
    proto = stored.get(node.input[1]) if len(node.input) > 1 else None
    if proto is None or len(proto.dims) < 2 or node.op_type not in ("Gemm", *_CONVOLUTIONS) or not node.output:
        return 0
    numbers = {attribute.name: int(attribute.i) for attribute in node.attribute}
    if node.op_type == "Gemm":
        return int(proto.dims[0 if numbers.get("transB") else 1])
    return int(proto.dims[0]) if node.op_type == "Conv" else int(proto.dims[1]) * numbers.get("group", 1)


def _sources(proto: TensorProto, value: Any) -> tuple[str, ...]:
    """Names of the tensors that a folded one was made from."""
    return tuple(dict.fromkeys(re.findall(r"'([^']*)'", _entry(proto, FOLDED_FROM) or _entry(value, FOLDED_FROM))))


def _entry(proto: Any, key: str) -> str:
    """One metadata entry of a graph, node, value or tensor; empty if there is none."""
    return next((str(entry.value) for entry in getattr(proto, "metadata_props", ()) if entry.key == key), "")


# -- files with the names of the module -------------------------------------------------------------------------------


def _numbered(found: Written, graph: GraphProto, stored: Mapping[str, TensorProto]) -> None:
    """Note copies of one parameter by folding: for several calls of one module, or transposed."""
    readers = _readers(graph)
    shapes = {tuple(proto.dims)[::-1] for name, proto in stored.items() if FOLDED.fullmatch(name)}
    firsts: dict[tuple[Any, ...], str] = {}
    for name, proto in stored.items():
        dims = tuple(proto.dims)
        if not FOLDED.fullmatch(name) and len(dims) == 2 and dims in shapes:
            firsts.setdefault((dims, "named", sample(proto)), name)
    for name, proto in stored.items():
        if not FOLDED.fullmatch(name):
            continue
        dims, taken = tuple(proto.dims), sample(proto)
        if readers.get(name, ("", ""))[0] in _CONVOLUTIONS and len(dims) > 2:
            found.numbered.append(name)
        original = firsts.get((dims[::-1], "named", sample(proto, transposed=True))) if len(dims) == 2 else None
        first = firsts.setdefault((dims, readers.get(name), taken), name)
        if taken is not None and (original or first) != name:
            found.copies[name] = (original, True) if original else (first, False)
    for output, name in _identities(graph, stored):
        if FOLDED.fullmatch(output) and readers.get(output) == readers.get(name):
            continue  # another call of the same module
        found.owners[output, 0] = output


def _identities(graph: GraphProto, stored: Mapping[str, TensorProto]) -> Iterator[tuple[str, str]]:
    """(output, input) of each ``Identity`` that the exporter inserted for a tensor that equals another one."""
    for node in graph.node:
        if node.op_type == "Identity" and len(node.input) == 1 and len(node.output) == 1:
            name, output = node.input[0], node.output[0]
            proto = stored.get(name)
            named = FOLDED.fullmatch(output) or ("." in output and not GENERATED.fullmatch(output))
            if proto is not None and proto.dims and named and re.fullmatch(r"Identity_\d+", node.name):
                yield output, name


def _readers(graph: GraphProto) -> dict[str, tuple[str, str]]:
    """Operator and module of the first node that reads a numbered tensor; calls of one module have one path.

    A later call of `/fc` is named `/fc_1`; without a `/fc`, this is the name of a module.
    """
    found: dict[str, tuple[str, str]] = {}
    paths = {node.name.rpartition("/")[0] for node in graph.node}
    for node in graph.node:
        for name in node.input:
            if node.op_type != "Identity" and name not in found and FOLDED.fullmatch(name):
                path = node.name.rpartition("/")[0]
                first = re.sub(r"_\d+(?=/|$)", "", path)
                found[name] = (node.op_type, first if first in paths else path)
    return found


_PLACES: Final = 64
"""Number of elements of a sample."""


def sample(proto: TensorProto, *, transposed: bool = False) -> bytes | None:
    """Elements of a stored tensor as a matrix, or of its transpose, at places that depend only on its shape.

    Matrices of random weights with equal samples are equal. None if the elements are in another file, or if all
    elements of the sample are equal.
    """
    count, data = math.prod(proto.dims), proto.raw_data
    size = len(data) // count if count > 0 else 0
    if not proto.dims or not size or size * count != len(data):
        return None
    rows = int(proto.dims[0])
    columns = count // rows
    height, width = (columns, rows) if transposed else (rows, columns)
    taken = []
    for n in range(_PLACES):
        i, j = n * height // _PLACES, n * 7919 % width
        place = (j * columns + i if transposed else i * columns + j) * size
        taken.append(data[place : place + size])
    return b"".join(taken) if len(set(taken)) > 1 else None
