"""Element types of tensors, and the bytes that an element of each takes."""

from __future__ import annotations

from typing import Final

#: Element type -> bytes of one element. Complex numbers are pairs; ``bool`` takes a byte, as in PyTorch.
ELEMENT_BYTES: Final = {
    "fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp8_e5m2": 1, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "bool": 1,
}  # fmt: skip

FLOATS: Final = frozenset({"fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp8_e5m2"})
"""Element types that a gradient can have."""
