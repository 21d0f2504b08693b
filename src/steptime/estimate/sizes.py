"""What the rows of a block hold: parameters and kept bytes, without any time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from steptime.num import Num
from steptime.plan.rows import Block, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Sums over some rows, per device (activations per micro-batch)."""

    weights: Num
    """Parameters."""
    replicated: Num
    """Those of them that every tensor-parallel rank holds."""
    kept_bytes: Num


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Parts of a model as one device holds them."""

    layer: Part
    first: Part
    last: Part
    boundary_bytes: Num
    working_bytes: Num


def part_of(rows: Iterable[Row]) -> Part:
    """Sums over rows."""
    weights: Num = 0.0
    replicated: Num = 0.0
    kept: Num = 0.0
    for row in rows:
        weights = weights + row.weights
        replicated = replicated + row.replicated
        kept = kept + row.kept_bytes
    return Part(weights=weights, replicated=replicated, kept_bytes=kept)


def sizes_of(block: Block) -> Sizes:
    """Sums over all parts of a block."""
    return Sizes(
        layer=part_of(block.layer), first=part_of(block.first), last=part_of(block.last),
        boundary_bytes=block.boundary_bytes, working_bytes=block.working_bytes,
    )  # fmt: skip
