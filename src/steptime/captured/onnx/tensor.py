"""Tensors of an ONNX graph by name, computed, with known numbers, or both; and open sizes."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from steptime.captured.graph.program import TensorType
from steptime.captured.graph.strides import tensor_type
from steptime.errors import FieldError, InputFileError, UnknownNameError, UserError, shorten
from steptime.model.spec import FLOATS

if TYPE_CHECKING:
    import torch
    from onnx import TensorProto, TensorShapeProto, ValueInfoProto

MAX_FOLDED_ELEMENTS = 2**20
"""Largest number of elements of an array that is computed while a file is read; larger ones stay nodes of the graph."""

MAX_PARTS = 2**14
"""Largest number of tensors of one sequence; each is a node of the graph."""


#: Number of an ONNX element type -> its name here. Types of four bits count as bytes.
DTYPES = {
    1: "fp32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "fp16",
    11: "fp64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128", 16: "bf16", 17: "fp8", 18: "fp8",
    19: "fp8_e5m2", 20: "fp8_e5m2", 21: "uint8", 22: "int8",
}  # fmt: skip
PACKED = (21, 22)
COMPLEX = ("complex64", "complex128")


def dtype_of(number: int) -> str:
    """Name of an ONNX element type.

    Raises:
        UserError: the type has no name (text, packed numbers).
    """
    if number not in DTYPES:
        raise UserError(f"tensors of ONNX element type {number} cannot be read", hint="text and packed types have none")
    return DTYPES[number]


GENERATED = re.compile(r"val_\d+|const\w*_\d+|onnx::\w+|.*/Constant\w*|.*lifted_tensor\w*|_tensor_constant\d+")
"""Pattern of names that exporters generate for numbers without a name in the module; they count as weights only where a
layer uses them as weights (a weight that the exporter has transposed), never in a sum or as a mask."""

FOLDED = re.compile(r"onnx::[A-Za-z]+_\d+")
"""Pattern of names that PyTorch's TorchScript exporter generates for folded tensors, from the operator that reads."""

BUFFERS = frozenset({
    "running_mean", "running_var", "num_batches_tracked", "inv_freq", "original_inv_freq", "position_ids",
    "token_type_ids", "relative_position_index", "relative_coords_table", "attn_mask", "masked_bias",
})  # fmt: skip
"""Last parts of the names that layers of PyTorch, ``transformers`` and ``timm`` register as buffers; in a file without
kinds, nothing else distinguishes them from parameters."""


@dataclass(slots=True)
class Tensor:
    """One name of an ONNX graph."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    value: torch.Tensor | None = None
    array: torch.Tensor | None = None
    """Known numbers, if they were computed, are integers, or are a single constant."""
    stored: TensorProto | None = None
    """The tensor in the file, if it is stored."""
    weight: bool = False
    """It is stored like a weight: floating-point and no scalar."""
    kind: str | None = None
    """``parameter``, ``buffer`` or ``constant``, if the file declares it or the graph has read it as such."""
    parts: list[Tensor] | None = None
    """Members, if it is a sequence; its own type is then meaningless."""

    @property
    def type(self) -> TensorType:
        """Shape and element type."""
        return TensorType(self.shape, self.dtype)

    def role(self, read_as: str = "constant") -> str:
        """``parameter``, ``buffer`` or ``constant``.

        The declaration of the file comes first, then the input that reads it (running statistics), its type and its
        name. A tensor with a generated name is a parameter where a layer reads it as weight, unless all its elements
        are one number, which the exporter fills in for a layer without a weight.
        """
        if self.kind is not None:
            return self.kind
        named = self.stored is not None and GENERATED.fullmatch(self.name) is None
        if read_as == "buffer" or (named and self.name.rpartition(".")[2] in BUFFERS):
            return "buffer"
        if self.dtype not in FLOATS:
            return "buffer" if named and "." in self.name else "constant"
        if self.weight:
            return "parameter"
        filled = self.uniform() is not None and not (self.stored is not None and FOLDED.fullmatch(self.name))
        return "parameter" if read_as == "parameter" and self.shape and not filled else "constant"

    def uniform(self) -> float | None:
        """The number that all known elements are equal to, else None; exporters fill in zeros and ones."""
        if self.array is None or not self.array.numel() or self.dtype in ("bool", *COMPLEX):
            return None
        from steptime.captured.torch_parts import without_modes

        with without_modes():
            numbers = self.array.double().reshape(-1)
            return float(numbers[0]) if bool((numbers == numbers[0]).all()) else None

    def numbers(self) -> torch.Tensor | None:
        """Numbers of the tensor, read from the file if it stores them; None if they are unknown."""
        if self.array is None and self.stored is not None:
            return read_array(self.stored)
        return self.array

    @property
    def elsewhere(self) -> str | None:
        """Name of the external file with its numbers; None if they are in the model file, or computed."""
        entries = () if self.stored is None else self.stored.external_data
        return next((shorten(entry.value) for entry in entries if entry.key == "location"), None)

    @classmethod
    def of_proto(cls, name: str, proto: TensorProto, *, weight: bool) -> Tensor:
        """A tensor that the file stores; ``weight``: its position could be that of a weight."""
        type = tensor_type(proto.dims, dtype_of(proto.data_type))
        named = GENERATED.fullmatch(proto.name) is None or type.elements > MAX_FOLDED_ELEMENTS
        weight = weight and named and type.dtype in FLOATS and type.rank > 0
        array = None if weight else read_array(proto)
        return cls(name, type.shape, type.dtype, array=array, stored=proto, weight=weight)


def flat(array: torch.Tensor) -> list[Any]:
    """All numbers of a tensor, in order."""
    found = array.tolist()
    for _ in range(array.dim() - 1):
        found = [number for row in found for number in row]
    return found if array.dim() else [found]


def read_array(proto: TensorProto) -> torch.Tensor | None:
    """Numbers of a stored tensor; None if it is large or its data are in another file.

    Raises:
        UserError: its element type has no name.
        ValueError: the size of the data does not match its shape.
    """
    if proto.external_data or proto.data_location == proto.EXTERNAL or math.prod(proto.dims) > MAX_FOLDED_ELEMENTS:
        return None
    import torch
    from onnx import numpy_helper

    from steptime.captured import torch_parts as parts
    from steptime.captured.record.values import TORCH_DTYPES

    dtype = TORCH_DTYPES[dtype_of(proto.data_type)]
    array = np.array(numpy_helper.to_array(proto), order="C")
    if array.dtype.kind == "V":  # types that NumPy does not have
        packed = proto.data_type in PACKED
        array = array.astype(np.int8) if packed else array.view(f"u{array.dtype.itemsize}")
    with parts.without_modes():
        return torch.from_numpy(array).view(dtype)


class Dims:
    """Sizes by symbol, and the symbols of the inputs of the file."""

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
        """Type of an input of the graph; None if a size is open, whose symbol is then noted.

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
        """Check that every open symbol has a size, and every size a symbol.

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
    """Name of an open size; bytes that are no UTF-8 become escapes."""
    name: str | bytes = dim.dim_param
    return name if isinstance(name, str) else name.decode("utf-8", "backslashreplace")
