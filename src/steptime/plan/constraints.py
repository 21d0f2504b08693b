"""Conditions that the user puts on plans: ``tp=8``, ``pp<=16``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from steptime.num import Array
from steptime.plan.plans import Plans, rows_of

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq, "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """One column of a plan compared with a number."""

    column: str
    relation: str
    value: int

    def holds(self, plans: Plans) -> Any:
        """Whether each plan satisfies it."""
        return OPERATORS[self.relation](getattr(plans, self.column), self.value)


#: Degrees whose product is the number of devices.
MESH_COLUMNS = ("tp", "tp2", "cp", "pp", "dp")


def kept(meshes: Plans, constraints: Sequence[Constraint]) -> Plans:
    """Meshes that satisfy the constraints on degrees."""
    admitted: Array = np.ones(rows_of(meshes), dtype=bool)
    for constraint in constraints:
        if constraint.column in MESH_COLUMNS:
            admitted &= constraint.holds(meshes)
    return meshes if admitted.all() else meshes.take(np.flatnonzero(admitted))
