"""Placement of a tensor on the devices of a mesh: along each axis sharded, replicated, or a term of a reduction."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from steptime.errors import UserError

Reduction: TypeAlias = Literal["sum", "avg", "max", "min", "product"]
REDUCTIONS: Final[tuple[Reduction, ...]] = ("sum", "avg", "max", "min", "product")


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """Placement of a tensor along one axis of a mesh: exactly one of sharded, partial and replicated.

    >>> print(shard(1), R, P, partial("max"))
    S(1) R P P(max)
    """

    dim: int | None = None
    """Index of the sharded dim; None: the tensor is not sharded."""
    reduction: Reduction | None = None
    """Reduction over the axis of which each device has a term; None: the tensor is not partial."""

    @property
    def sharded(self) -> bool:
        """Each device has a piece of one dim."""
        return self.dim is not None

    @property
    def partial(self) -> bool:
        """Each device has a term of a reduction."""
        return self.reduction is not None

    @property
    def replicated(self) -> bool:
        """Every device has the whole tensor."""
        return self.dim is None and self.reduction is None

    def __str__(self) -> str:
        if self.dim is not None:
            return f"S({self.dim})"
        if self.reduction is None:
            return "R"
        return "P" if self.reduction == "sum" else f"P({self.reduction})"


R: Final = Placement()
"""Every device has the whole tensor."""
P: Final = Placement(reduction="sum")
"""Each device has a term of a sum."""

Sharding: TypeAlias = tuple[Placement, ...]
"""Placement along each axis of a mesh, in the order of its axes.

Where several axes shard one dim, the first of them divides it first (as in ``torch.distributed.tensor``).
"""


def shard(dim: int) -> Placement:
    """Sharded along a dim, from 0."""
    return Placement(dim=dim)


def partial(reduction: Reduction) -> Placement:
    """A term of a reduction."""
    return Placement(reduction=reduction)


_TEXT: Final = re.compile(r"R|P(?:\((\w+)\))?|S\((\d+)\)")


def placement_of(text: str) -> Placement:
    """The placement that a text names: ``R``, ``P``, ``P(max)``, ``S(0)``.

    Raises:
        UserError: the text is none of these.

    >>> [placement_of(text) == each for text, each in (("S(2)", shard(2)), ("P", P), ("R", R))]
    [True, True, True]
    """
    found = _TEXT.fullmatch(text.strip())
    if found is None or (found[1] is not None and found[1] not in REDUCTIONS):
        raise UserError(f"{text!r} is not a placement", hint="write R, P, P(max) or S(0)")
    if found[2] is not None:
        return shard(int(found[2]))
    return next((partial(each) for each in REDUCTIONS if each == (found[1] or "sum")), P) if "P" in text else R


def pieces(sharding: Sharding, sizes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Number of pieces of each dim of a tensor of `rank` dims, on a mesh with axes of `sizes` devices.

    >>> pieces((shard(0), shard(0)), (2, 4), 2), pieces((R, shard(1)), (2, 4), 2)
    ((8, 1), (1, 4))
    """
    out = [1] * rank
    for placement, size in zip(sharding, sizes, strict=True):
        if placement.dim is not None:
            out[placement.dim] *= size
    return tuple(out)


UNEVEN: Final = 1 / 8
"""Fraction by which the largest piece of a dim may exceed an equal piece."""


def parted(size: int, count: int) -> bool:
    """Divisibility of a dim into `count` pieces: equal ones, or, as with DTensor, with smaller last ones.

    >>> parted(50257, 4), parted(9, 8), parted(3, 4)
    (True, False, False)
    """
    return -(-size // count) * count <= size * (1 + UNEVEN) if size % count else True


def divides(shape: Sequence[int], sharding: Sharding, sizes: Sequence[int]) -> bool:
    """True if each device gets a piece of each sharded dim (:func:`parted`).

    >>> divides((8, 3), (shard(0), R), (2, 4)), divides((8, 3), (R, shard(1)), (2, 4)), divides((8,), (shard(1),), (2,))
    (True, False, False)
    """
    if any(placement.dim is not None and placement.dim >= len(shape) for placement in sharding):
        return False
    return all(parted(size, count) for size, count in zip(shape, pieces(sharding, sizes, len(shape)), strict=True))


def local_shape(shape: Sequence[int], sharding: Sharding, sizes: Sequence[int]) -> tuple[int, ...]:
    """Shape of the largest piece on a device; the sharding has to divide the shape (:func:`divides`).

    >>> local_shape((8, 6), (shard(0), shard(1)), (2, 3)), local_shape((50257,), (shard(0),), (4,))
    ((4, 2), (12565,))
    """
    counts = pieces(sharding, sizes, len(shape))
    return tuple(-(-size // count) for size, count in zip(shape, counts, strict=True))


def text_of(sharding: Iterable[Placement]) -> str:
    """Text of a sharding in reports.

    >>> text_of((shard(0), R))
    'S(0) R'
    """
    return " ".join(map(str, sharding))
