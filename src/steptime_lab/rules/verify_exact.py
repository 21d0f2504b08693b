"""Layer (ii): comparison of both sides as exact polynomials in the variables' elements, for a few small shapes."""

from __future__ import annotations

from math import prod
from typing import Final

from steptime_lab.rules.domains import Polynomials
from steptime_lab.rules.rule import Rule, assignments
from steptime_lab.rules.verify_random import agrees, shapes_at

SHAPES: Final = 3
"""Largest number of shapes for which polynomials are compared."""
MOST_ELEMENTS: Final = 48
"""Largest number of elements of the largest variable."""


def small(rule: Rule) -> list[dict[str, int]]:
    """Assignments of sizes with few elements; those with the fewest sizes of one come first."""
    found = [at for at in assignments(rule, 40, 1, 3) if _largest(rule, at) <= MOST_ELEMENTS]
    found = found or sorted(assignments(rule, 40, 1, 5), key=lambda at: _largest(rule, at))[:1]
    found.sort(key=lambda at: (sum(value == 1 for value in at.values()), sum(at.values())))
    return found[:SHAPES]


def _largest(rule: Rule, at: dict[str, int]) -> int:
    return max((prod(shape) for shape in shapes_at(rule, at).values()), default=1)


def proved_exactly(rule: Rule) -> int | None:
    """Number of shapes for which both sides are equal polynomials; None: they differ for one."""
    shapes = small(rule)
    return len(shapes) if all(agrees(rule, Polynomials(), at, shapes_at(rule, at), 0) for at in shapes) else None
