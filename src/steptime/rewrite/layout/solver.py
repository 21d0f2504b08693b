"""The best choice of layouts as an integer program, solved by HiGHS with a proof."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from steptime.errors import UserError
from steptime.registry import needed
from steptime.rewrite.layout.problem import Assignment

TIME_LIMIT_S: Final = 20.0
"""Time limit of HiGHS in seconds."""
EXACT: Final = 1e-9
"""Gap below which a solution counts as the optimum."""


@dataclass(frozen=True, slots=True)
class Solved:
    """A choice, its cost, and a lower bound of the cost of all choices."""

    choice: tuple[int, ...]
    cost: float
    bound: float


class _Program:
    """Columns and rows of the integer program."""

    def __init__(self, local: Assignment) -> None:
        self.local = local
        self.cost: list[float] = []
        self.whole: list[int] = []
        self.entries: tuple[list[int], list[int], list[float]] = ([], [], [])
        self.low: list[float] = []
        self.high: list[float] = []
        self.x = [[self._column(o.cost, whole=True) for o in options] for options in local.vertices]
        for columns in self.x:
            self._row([(column, 1.0) for column in columns], 1.0, 1.0)
        for number in range(len(local.slots)):
            self._slot(number)

    def _column(self, cost: float, *, whole: bool = False) -> int:
        self.cost.append(cost)
        self.whole.append(int(whole))
        return len(self.cost) - 1

    def _row(self, entries: Sequence[tuple[int, float]], low: float, high: float) -> None:
        at = len(self.low)
        for column, value in entries:
            self.entries[0].append(at)
            self.entries[1].append(column)
            self.entries[2].append(value)
        self.low.append(low)
        self.high.append(high)

    def _slot(self, number: int) -> None:
        local, slot = self.local, self.local.slots[number]
        groups: dict[tuple[int, frozenset[int], float, int], list[int]] = defaultdict(list)
        for reader in local.readers[number]:
            for option, column in zip(local.vertices[reader], self.x[reader], strict=True):
                seen: dict[tuple[frozenset[int], float], int] = defaultdict(int)
                for need in option.needs:
                    if need.slot == number:
                        key = (need.allowed, need.otherwise)
                        groups[reader, *key, seen[key]].append(column)
                        seen[key] += 1
        givers = list(zip(local.vertices[slot.vertex], self.x[slot.vertex], strict=True))
        made: dict[int, int] = {}
        for (_, allowed, otherwise, _), columns in groups.items():
            serving = [column for option, column in givers if option.gives[slot.index] in allowed]
            if len(serving) == len(givers):
                continue
            entries = [(column, 1.0) for column in columns] + [(column, -1.0) for column in serving]
            for target in sorted(allowed):
                if math.isfinite(slot.convert[target]):
                    if target not in made:
                        made[target] = self._column(slot.convert[target])
                    entries.append((made[target], -1.0))
            if math.isfinite(otherwise):
                entries.append((self._column(otherwise), -1.0))
            self._row(entries, -math.inf, 0.0)


def solve(problem: Assignment, limit_s: float = TIME_LIMIT_S) -> Solved:
    """The cheapest choice.

    Args:
        problem: vertices, options and slots.
        limit_s: time limit in seconds.

    Raises:
        UserError: SciPy is missing, or no choice was found in time.
    """
    optimize, sparse = (needed(name, "layouts", "rewrite") for name in ("scipy.optimize", "scipy.sparse"))
    import numpy as np

    program = _Program(problem)
    rows, columns, values = program.entries
    shape = (len(program.low), len(program.cost))
    scale = max(program.cost) or 1.0
    found = optimize.milp(
        np.array(program.cost) / scale,
        integrality=np.array(program.whole),
        bounds=optimize.Bounds(0, np.where(np.array(program.whole) > 0, 1.0, np.inf)),
        constraints=optimize.LinearConstraint(
            sparse.csr_matrix((values, (rows, columns)), shape=shape), program.low, program.high
        ),
        options={"time_limit": limit_s, "mip_rel_gap": EXACT},
    )
    if found.x is None:
        raise UserError(f"no layouts were found in {limit_s:g} s", hint="take fewer blocks of the model")
    choice = tuple(max(range(len(each)), key=lambda n, each=each: found.x[each[n]]) for each in program.x)  # type: ignore[misc]
    cost = problem.total(choice)
    bound = cost if found.status == 0 else float(found.mip_dual_bound) * scale
    return Solved(choice, cost, min(bound, cost))
