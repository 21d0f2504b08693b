"""Layer (ii): both sides as exact polynomials in the elements of the variables, for a few small shapes."""

from __future__ import annotations

from math import prod
from typing import Final

from steptime_lab.rules.domains import Polynomials
from steptime_lab.rules.rule import Rule, assignments
from steptime_lab.rules.verify_random import agrees, shapes_at

SHAPES: Final = 3
"""Shapes for which polynomials are compared."""
MOST_ELEMENTS: Final = 48
"""Elements of the largest variable."""


def small(rule: Rule) -> list[dict[str, int]]:
    """Assignments of sizes with few elements, those with unequal sizes above one first."""
    found = [at for at in assignments(rule, 40, 1, 3) if _largest(rule, at) <= MOST_ELEMENTS]
    found = found or sorted(assignments(rule, 40, 1, 5), key=lambda at: _largest(rule, at))[:1]
    found.sort(key=lambda at: (sum(value == 1 for value in at.values()), sum(at.values())))
    return found[:SHAPES]


def _largest(rule: Rule, at: dict[str, int]) -> int:
    return max((prod(shape) for shape in shapes_at(rule, at).values()), default=1)


def proved_exactly(rule: Rule) -> int | None:
    """For how many shapes both sides are the same polynomials; None where they are not for one."""
    shapes = small(rule)
    return len(shapes) if all(agrees(rule, Polynomials(), at, shapes_at(rule, at), 0) for at in shapes) else None
