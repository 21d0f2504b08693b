"""What a name of an ONNX graph stands for: a value of our graph, numbers that are known, or both; and open sizes."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from steptime.captured.aten.views import tensor_type
from steptime.captured.graph.program import Nodes, TensorType, Value
from steptime.errors import FieldError, InputFileError, UnknownNameError, UserError, shorten
from steptime.model.spec import FLOATS

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import TensorProto, TensorShapeProto, ValueInfoProto

    Array = NDArray[Any]


MAX_FOLDED_ELEMENTS = 2**20
"""Elements of an array that is computed or held while a file is read; what is larger stays a node of the graph."""

MAX_PARTS = 2**14
"""Tensors of one sequence; each is a node of the graph."""


#: Number of an ONNX element type -> our name. Types of four bits are counted as bytes.
DTYPES = {
    1: "fp32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "fp16",
    11: "fp64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128", 16: "bf16", 17: "fp8", 18: "fp8",
    19: "fp8_e5m2", 20: "fp8_e5m2", 21: "uint8", 22: "int8",
}  # fmt: skip

_NUMPY = {
    "float32": "fp32", "float64": "fp64", "float16": "fp16", "bfloat16": "bf16", "bool": "bool",
    "complex64": "complex64", "complex128": "complex128", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8_e5m2",
}  # fmt: skip


def dtype_of(number: int) -> str:
    """Our name of an ONNX element type.

    Raises:
        UserError: the type has none (text, packed numbers).
    """
    if number not in DTYPES:
        raise UserError(f"tensors of ONNX element type {number} cannot be read", hint="text and packed types have none")
    return DTYPES[number]


def dtype_of_array(array: Array) -> str:
    """Our name of the element type of an array."""
    return _NUMPY.get(array.dtype.name, array.dtype.name)


GENERATED = re.compile(r"val_\d+|const\w*_\d+|onnx::\w+|.*/Constant\w*|.*lifted_tensor\w*|_tensor_constant\d+")
"""Names that exporters make up for numbers without a name in the module; they count as weights only where a layer uses
them as weights (a weight that the exporter has transposed), never in a sum or as a mask."""

FOLDED = re.compile(r"onnx::[A-Za-z]+_\d+")
"""Names that PyTorch's exporter for TorchScript makes up for what it folded, by the operator that reads it."""

BUFFERS = frozenset({
    "running_mean", "running_var", "num_batches_tracked", "inv_freq", "original_inv_freq", "position_ids",
    "token_type_ids", "relative_position_index", "relative_coords_table", "attn_mask", "masked_bias",
})  # fmt: skip
"""Last parts of the names that layers of PyTorch, ``transformers`` and ``timm`` register as buffers: where a file does
not say it, nothing else tells them from parameters."""


@dataclass(slots=True)
class Tensor:
    """One name of an ONNX graph."""

    name: str
    type: TensorType
    value: Value | None = None
    array: Array | None = None
    """Its numbers, where they were computed or are an integer or a single constant."""
    stored: TensorProto | None = None
    """Its numbers in the file, where they are not needed to know shapes."""
    weight: bool = False
    """It is stored by itself as a weight would be: floating-point and no scalar."""
    kind: str | None = None
    """``parameter``, ``buffer`` or ``constant``, where the file says so."""
    parts: list[Tensor] | None = None
    """It is a sequence of these; its own type is then that of none of them."""

    def of(self, nodes: Nodes, kind: str = "constant") -> Value:
        """The value in our graph; a stored tensor becomes a source when it is first asked for."""
        if self.parts is not None:
            raise ValueError(f"{self.name!r} is a sequence, where a tensor is needed")
        if self.value is None:
            self.value = nodes.source(self.role(kind), self.name, self.type)
        return self.value

    def role(self, read_as: str = "constant") -> str:
        """``parameter``, ``buffer`` or ``constant``.

        What the file says comes first, then what the input is that reads it (running statistics), its type and its
        name; what has a made-up name is a parameter where a layer reads its weight, unless it is filled with one number
        that the exporter has put in for a layer without a weight.
        """
        if self.kind is not None:
            return self.kind
        named = self.stored is not None and GENERATED.fullmatch(self.name) is None
        if read_as == "buffer" or (named and self.name.rpartition(".")[2] in BUFFERS):
            return "buffer"
        if self.type.dtype not in FLOATS:
            return "buffer" if named and "." in self.name else "constant"
        if self.weight:
            return "parameter"
        filled = self.uniform() is not None and not (self.stored is not None and FOLDED.fullmatch(self.name))
        return "parameter" if read_as == "parameter" and self.type.rank and not filled else "constant"

    def uniform(self) -> float | None:
        """The one number that all its elements are, where they are known: exporters fill in zeros and ones."""
        if self.array is None or not self.array.size or self.array.dtype.kind not in "fiu":
            return None
        first = self.array.reshape(-1)[0]
        return float(first) if bool((self.array == first).all()) else None

    def numbers(self) -> Array | None:
        """Its numbers, read from the file where they are in it; None where they are not known."""
        if self.array is None and self.stored is not None:
            return read_array(self.stored)
        return self.array

    @property
    def elsewhere(self) -> str | None:
        """Name of the other file that its numbers are in; None where they are in this one, or are computed."""
        entries = () if self.stored is None else self.stored.external_data
        return next((shorten(entry.value) for entry in entries if entry.key == "location"), None)

    @classmethod
    def known(cls, name: str, array: Array) -> Tensor:
        """A tensor whose numbers are known."""
        return cls(name, tensor_type(array.shape, dtype_of_array(array)), array=array)

    @classmethod
    def of_value(cls, name: str, value: Value) -> Tensor:
        """A tensor that is computed."""
        return cls(name, value.type, value=value)

    @classmethod
    def of_proto(cls, name: str, proto: TensorProto, *, weight: bool) -> Tensor:
        """A tensor that the file stores; ``weight``: where it could be one."""
        type = tensor_type(proto.dims, dtype_of(proto.data_type))
        named = GENERATED.fullmatch(proto.name) is None or type.elements > MAX_FOLDED_ELEMENTS
        weight = weight and named and type.dtype in FLOATS and type.rank > 0
        made = cls(name, type, stored=proto, weight=weight)
        if not weight:
            made.array = read_array(proto)
        return made


def read_array(proto: TensorProto) -> Array | None:
    """Numbers of a stored tensor; None where it is large or its data are in another file.

    Raises:
        ValueError: there are more or fewer data than its shape needs.
    """
    from onnx import numpy_helper

    elements = math.prod(proto.dims)
    if proto.external_data or proto.data_location == proto.EXTERNAL or elements > MAX_FOLDED_ELEMENTS:
        return None
    return np.asarray(numpy_helper.to_array(proto))


class Dims:
    """Sizes by symbol; it remembers which symbols the inputs of the file have."""

    def __init__(self, path: str, given: Mapping[str, int] | None) -> None:
        self.path = path
        self.given = dict(given or {})
        self.symbols: dict[str, str] = {}
        """Symbol -> input that has it."""
        for name, size in self.given.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise FieldError("dims", name, f"{size!r} is not a size", hint="a whole number of 1 or more")

    def known(self, dim: TensorShapeProto.Dimension) -> int | None:
        """A size from the file or from the user."""
        if dim.HasField("dim_value"):
            return int(dim.dim_value)
        return self.given.get(_symbol(dim))

    def input_type(self, value: ValueInfoProto) -> TensorType | None:
        """Type of an input of the graph; None where a size is open, whose symbol is then noted.

        Raises:
            InputFileError: it is no tensor, or has no shape.
        """
        if not value.type.HasField("tensor_type"):
            raise InputFileError(self.path, f"input {value.name!r} is not a tensor")
        proto = value.type.tensor_type
        if not proto.HasField("shape"):
            raise InputFileError(self.path, f"input {value.name!r} has no shape", hint="export it with a shape")
        sizes = []
        for number, dim in enumerate(proto.shape.dim):
            symbol = _symbol(dim) or f"{value.name}.{number}"
            if not dim.HasField("dim_value"):
                self.symbols.setdefault(symbol, value.name)
            size = int(dim.dim_value) if dim.HasField("dim_value") else self.given.get(symbol)
            sizes.append(size)
        if any(size is None for size in sizes):
            return None
        try:
            return tensor_type([size for size in sizes if size is not None], dtype_of(proto.elem_type))
        except (ValueError, UserError) as problem:
            raise InputFileError(self.path, f"input {value.name!r}: {problem}") from None

    def check(self) -> None:
        """Every open symbol has a size, and every size a symbol.

        Raises:
            UserError: sizes are missing; the message names the symbols.
            UnknownNameError: a size is given for a symbol that no input has.
        """
        missing = [f"{symbol!r} (of {name!r})" for symbol, name in self.symbols.items() if symbol not in self.given]
        if missing:
            names = [symbol for symbol in self.symbols if symbol not in self.given]
            options = " ".join(f"--dim {shlex.quote(name)}=SIZE" for name in names)
            asked = ", ".join(f'"{name}": SIZE' for name in names)
            raise UserError(
                f"{self.path}: sizes are open: {', '.join(missing)}", hint=f"give {options}, in Python dims={{{asked}}}"
            )
        for name in self.given:
            if name not in self.symbols:
                raise UnknownNameError("open size", name, self.symbols, where=self.path)


def _symbol(dim: TensorShapeProto.Dimension) -> str:
    """Name of an open size; bytes that are no text come as escapes."""
    name: str | bytes = dim.dim_param
    return name if isinstance(name, str) else name.decode("utf-8", "backslashreplace")
