"""Loading of an ONNX file that may be hostile: size, syntax, external data, functions; weights are never loaded.

Small numbers (shapes, indices) are also read from another file of the folder.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from steptime.captured.onnx.tensor import DTYPES, GENERATED
from steptime.errors import InputFileError, shorten
from steptime.model.spec import ELEMENT_BYTES, FLOATS
from steptime.registry import require
from steptime.store.files import refuse_endless, unreadable

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto


MAX_ELEMENTS = 65536
"""Largest number of elements of a tensor that is fetched."""


def fetch(model: Path, tensor: TensorProto) -> None:
    """Load the external data of a small tensor that is no weight; a missing file is ignored.

    Raises:
        InputFileError: the file is, through a link, outside the folder of the model, or lacks the data.
    """
    elements = math.prod(tensor.dims)
    dtype = DTYPES.get(tensor.data_type)
    if not tensor.external_data or dtype is None or not 0 <= elements <= MAX_ELEMENTS:
        return
    if dtype in FLOATS and tensor.dims and GENERATED.fullmatch(tensor.name) is None:
        return
    entries = {entry.key: entry.value for entry in tensor.external_data}
    place = _inside(model, tensor.name, entries.get("location", ""))
    if not place.is_file():
        return
    data = _data_at(model, tensor, place, entries.get("offset", "0"))
    del tensor.external_data[:]
    tensor.data_location = tensor.DEFAULT
    tensor.raw_data = data


def stored_array(model: Path, tensor: TensorProto) -> NDArray[Any]:
    """Numbers of a stored tensor, from the model file or from another file of its folder.

    Raises:
        InputFileError: the other file is missing, too short, or (through a link) outside the folder.
    """
    from onnx import TensorProto, numpy_helper

    entries = {entry.key: entry.value for entry in tensor.external_data}
    if not entries:
        return numpy_helper.to_array(tensor)
    place = _inside(model, tensor.name, entries.get("location", ""))
    data = _data_at(model, tensor, place, entries.get("offset", "0"))
    whole = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, raw_data=data)
    return numpy_helper.to_array(whole)


def _data_at(model: Path, tensor: TensorProto, place: Path, offset: str) -> bytes:
    """Bytes of a tensor in another file, starting at an offset."""
    size = math.prod(tensor.dims) * ELEMENT_BYTES[DTYPES[tensor.data_type]]
    try:
        with place.open("rb") as file:
            file.seek(int(offset))
            data = file.read(size)
    except (OSError, ValueError, OverflowError):
        data = b""
    if len(data) != size:
        raise InputFileError(str(model), f"the data of {shorten(tensor.name)!r} are not in {shorten(place.name)!r}")
    return data


def _inside(model: Path, name: str, location: str) -> Path:
    """Path of the external file of a tensor, which must be in the folder of the model."""
    folder = model.parent.resolve()
    place = (folder / location).resolve()
    if not place.is_relative_to(folder):
        raise InputFileError(str(model), f"the data of {shorten(name)!r} are outside its folder, through a link")
    return place


MAX_FILE_BYTES = 2**31 - 1
"""Largest size of a protobuf message."""
MAX_NODES = 1_000_000
"""Largest number of nodes of a file after its functions are inlined."""


def load_model(path: Path) -> ModelProto:
    """Model of a file with its functions inlined, without the contents of external weights.

    Raises:
        InputFileError: the file cannot be read, is over 2 GiB, is no ONNX model, names data outside its folder, or
            has functions that call themselves or expand to more than ``MAX_NODES`` nodes.
        UserError: the ``onnx`` library is not installed.
    """
    require("onnx", "reading an ONNX file")
    from onnx import ModelProto

    model = ModelProto()
    refuse_endless(path)
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise InputFileError(str(path), f"{size} bytes; a model may have {MAX_FILE_BYTES} at most", hint=_SPLIT)
        model.ParseFromString(path.read_bytes())
    except OSError as problem:
        raise unreadable(path, problem) from None
    except (import_module("google.protobuf.message").DecodeError, UnicodeDecodeError):
        raise InputFileError(str(path), "not an ONNX model, or cut off") from None
    if not model.HasField("graph") or not model.opset_import:
        raise InputFileError(str(path), "not an ONNX model: it has no graph or no operator-set version")
    for tensor in tensors(model.graph):
        _check_location(path, tensor)
        fetch(path, tensor)
    for function in model.functions:
        for node in function.node:
            for tensor in _node_tensors(node):
                _check_location(path, tensor)
    return _inlined(path, model)


_SPLIT = "save its weights as external data"


def tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """All tensors that a graph and its sub-graphs store."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield sparse.values
        yield sparse.indices
    for node in graph.node:
        yield from _node_tensors(node)


def _node_tensors(node: NodeProto) -> Iterator[TensorProto]:
    for attribute in node.attribute:
        yield from (attribute.t, *attribute.tensors)
        for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
            yield sparse.values
            yield sparse.indices
        for graph in (attribute.g, *attribute.graphs):
            yield from tensors(graph)


def _check_location(path: Path, tensor: TensorProto) -> None:
    """Refuse data outside the folder of the model, although they would not be read."""
    for entry in tensor.external_data:
        if entry.key != "location":
            continue
        place = entry.value.replace("\\", "/")
        outside = PurePosixPath(place).is_absolute() or ".." in PurePosixPath(place).parts
        if outside or re.match(r"[A-Za-z]:|[A-Za-z][A-Za-z0-9+.-]*://", place) or "\0" in place:
            raise InputFileError(
                str(path),
                f"the data of {shorten(tensor.name)!r} are declared to be at {shorten(entry.value)!r}",
                hint="external data must be in the folder of the model or below it",
            )


def _inlined(path: Path, model: ModelProto) -> ModelProto:
    """Model with each call of one of its functions replaced by the nodes of the function."""
    functions = {(f.domain, f.name, getattr(f, "overload", "")): f for f in model.functions}
    count = _unfolded(path, model.graph.node, functions, {}, ())
    if count > MAX_NODES:
        raise InputFileError(str(path), f"{count} nodes with its functions inlined; {MAX_NODES} at most")
    if not functions:
        return model
    from onnx import inliner

    try:
        return inliner.inline_local_functions(model)
    except Exception as problem:  # the library documents no exceptions
        raise InputFileError(str(path), f"its functions cannot be inlined: {shorten(str(problem))}") from None


_Key = tuple[str, str, str]


def _unfolded(
    path: Path, nodes: Any, functions: dict[_Key, FunctionProto], known: dict[_Key, int], inside: tuple[_Key, ...]
) -> int:
    """Number of nodes after inlining, counted without inlining."""
    total = 0
    for node in nodes:
        key = (node.domain, node.op_type, getattr(node, "overload", ""))
        if key in inside:
            raise InputFileError(str(path), f"its function {shorten(node.op_type)!r} calls itself")
        if key in functions and key not in known:
            if len(inside) > 100:
                raise InputFileError(str(path), "its functions are nested more than 100 deep")
            known[key] = _unfolded(path, functions[key].node, functions, known, (*inside, key))
        total += known.get(key, 1)
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                total += _unfolded(path, graph.node, functions, known, inside)
    return total
