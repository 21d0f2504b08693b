"""What is known of an ATen operator from its schema, and its arguments in the words of the graph."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from steptime.captured.graph import Attribute
from steptime.errors import UserError

DTYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8", torch.float8_e4m3fnuz: "fp8", torch.float8_e5m2: "fp8_e5m2",
    torch.float8_e5m2fnuz: "fp8_e5m2", torch.complex64: "complex64", torch.complex128: "complex128",
    torch.int64: "int64", torch.int32: "int32", torch.int16: "int16", torch.int8: "int8", torch.uint8: "uint8",
    torch.uint16: "uint16", torch.uint32: "uint32", torch.uint64: "uint64", torch.bool: "bool",
}  # fmt: skip

TORCH_DTYPES = {name: kind for kind, name in reversed(DTYPES.items())}
"""Our name -> PyTorch's type: of two with one name, the first."""

RANDOM = re.compile(r"dropout|bernoulli|rand|normal|uniform|exponential|multinomial|geometric|cauchy")
"""Names of operators that give something else at every call."""


@dataclass(frozen=True, slots=True)
class Signature:
    """An overload: its plain name, the names of its arguments, which of them it writes."""

    name: str
    arguments: tuple[str, ...]
    written: tuple[str, ...]
    random: bool


@cache
def signature(overload: Any) -> Signature:
    """Signature of an overload, read once.

    The name has no namespace unless that is another than ``aten``, and no trailing underscore.
    """
    schema = overload._schema
    space, _, name = schema.name.partition("::")
    plain = name.removesuffix("_") if not name.startswith("__") else name
    written = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return Signature(
        plain if space in ("aten", "steptime_cuda") else f"{space}::{plain}",
        tuple(a.name for a in schema.arguments), written,
        RANDOM.search(name) is not None and "backward" not in name,
    )  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    """Our name of an element type.

    Raises:
        UserError: the type has none (quantised and packed types).
    """
    if dtype not in DTYPES:
        raise UserError(f"tensors of {dtype} cannot be captured", hint="use a plain floating-point or integer type")
    return DTYPES[dtype]


def attribute(given: Any) -> Attribute:
    """A scalar argument as an attribute; what has no plain form becomes its text."""
    if given is None or isinstance(given, (bool, int, float, str)):
        return given
    if isinstance(given, torch.dtype):
        return dtype_name(given)
    if isinstance(given, (list, tuple)):
        return tuple(attribute(item) for item in given)
    return str(given)
