"""Sizes that a file leaves open, and the ones that the user gives."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

from steptime.captured.aten.layout import tensor_type
from steptime.captured.graph.types import TensorType
from steptime.captured.onnx.tensor import dtype_of
from steptime.errors import FieldError, InputFileError, UnknownNameError, UserError

if TYPE_CHECKING:
    from onnx import TensorShapeProto, ValueInfoProto


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
