"""What a tensor is to the graph: shape, element type and strides; no data, no device."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steptime.errors import UserError
from steptime.model.spec import ELEMENT_BYTES


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a tensor whose last dim varies fastest.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape (elements per dim), element type, and strides in elements (`None`: contiguous).

    >>> TensorType((2, 3), "bf16").size_bytes
    12
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_BYTES:
            raise UserError(
                f"element type {self.dtype!r} is unknown", hint=f"it is one of {', '.join(sorted(ELEMENT_BYTES))}"
            )

    @property
    def elements(self) -> int:
        """Product of the shape; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements, each counted once."""
        return self.elements * self.element_bytes

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def with_shape(self, *shape: int) -> TensorType:
        """A contiguous tensor of the same element type."""
        return TensorType(shape, self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}[{'x'.join(map(str, self.shape))}]"
