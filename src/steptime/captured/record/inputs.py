"""Inputs of a module as text: shape, element type, name."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from steptime.captured.graph import ELEMENT_BYTES
from steptime.errors import FieldError, UserError, shorten, shown

_SPEC = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>\d+(?:x\d+)*|scalar)(?::(?P<dtype>\w+))?")
LARGEST = 2**48
"""Largest number of elements of an input; a larger shape is a typing error."""


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One argument of a module's forward."""

    shape: tuple[int, ...]
    dtype: str | None
    """Element type; None: that of the weights."""
    name: str | None = None


def parse_input(text: str) -> InputSpec:
    """Read ``[NAME=]8x1024[:int64]``.

    Raises:
        UserError: the text has another form, or the shape is too large.

    >>> parse_input("ids=8x1024:int64")
    InputSpec(shape=(8, 1024), dtype='int64', name='ids')
    """
    match = _SPEC.fullmatch(text.strip())
    if match is None:
        hint = "write [NAME=]8x1024[:int64], for example 8x3x224x224"
        raise UserError(f"--input {shorten(text)!r} is no shape", hint=hint)
    dtype = match["dtype"]
    if dtype is not None and dtype not in ELEMENT_BYTES:
        raise UserError(f"--input {shorten(text)!r}: element type {dtype!r} is unknown", hint=", ".join(ELEMENT_BYTES))
    shape = () if match["shape"] == "scalar" else tuple(int(size) for size in match["shape"].split("x"))
    if math.prod(shape) > LARGEST:
        raise UserError(f"--input {shorten(text)!r} has more than 2^48 elements")
    return InputSpec(shape, dtype, match["name"])


def parse_inputs(texts: Any) -> tuple[InputSpec, ...]:
    """Read the inputs of a module: a list of texts, or one text.

    Raises:
        UserError: the argument has another type, or one of the texts is no shape.

    >>> [spec.shape for spec in parse_inputs(["8x3", "8"])], parse_inputs("8x3")[0].shape
    ([(8, 3), (8,)], (8, 3))
    """
    given = (texts,) if isinstance(texts, str) else texts
    if not isinstance(given, (list, tuple)) or not all(isinstance(text, str) for text in given):
        raise FieldError("", "inputs", f"{shown(texts)} is not a list of texts", hint="for example ['8x1024']")
    return tuple(parse_input(text) for text in given)


def made(specs: tuple[InputSpec, ...], dtype: str | None) -> Any:
    """Meta tensors of inputs: a tuple, or a dict if all have names.

    Raises:
        UserError: only some inputs have names.
    """
    import torch

    from steptime.captured.record.values import TORCH_DTYPES

    named = [spec for spec in specs if spec.name is not None]
    if named and len(named) != len(specs):
        raise UserError("some inputs have a name and some have none", hint="name all of them, or none")
    tensors = [
        torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype or dtype or "fp32"], device="meta") for spec in specs
    ]
    if named:
        return {str(spec.name): tensor for spec, tensor in zip(specs, tensors, strict=True)}
    return tuple(tensors)
