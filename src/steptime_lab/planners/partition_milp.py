"""The best split by mixed-integer programming, as a check of :mod:`steptime.simulation.partition`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from steptime.errors import InternalError
from steptime.num import Array
from steptime.registry import require
from steptime.simulation.partition import SplitTask


def proved_slowest_s(task: SplitTask) -> float | None:
    r"""Seconds of the slowest rank of the best split, by HiGHS; None where no split fits into the memory.

    Binaries $y_{i,s}$ say that item $i$ is on stage $s$ or an earlier one. They do not increase with $i$, do not
    decrease with $s$, and each stage has at least one item.
    """
    if task.stages == 1:
        return task.slowest_s((task.items,)) if task.fits((task.items,)) else None
    require("highspy", "a split by mixed-integer programming")
    import highspy

    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.silent()
    stages, items = task.stages, task.items
    done = [[solver.addBinary() for _ in range(stages - 1)] for _ in range(items)]
    longest = solver.addVariable(lb=0, ub=highspy.kHighsInf, obj=1.0)

    def on(item: int, stage: int) -> Any:
        after = 1 if stage == stages - 1 else done[item][stage]
        return after if stage == 0 else after - done[item][stage - 1]

    for item in range(items):
        for stage in range(stages - 1):
            if stage:
                solver.addConstr(done[item][stage - 1] <= done[item][stage])
            if item:
                solver.addConstr(done[item][stage] <= done[item - 1][stage])
    for stage in range(stages):
        solver.addConstr(sum(on(item, stage) for item in range(items)) >= 1)
    scale = float(task.room_bytes[np.isfinite(task.room_bytes)].max(initial=1.0))
    for rank, room in enumerate(task.room_bytes.tolist()):
        own = np.flatnonzero(task.rank == rank).tolist()
        busy, held = (_summed(on, own, values[rank], items) for values in (task.seconds, task.held_bytes / scale))
        solver.addConstr(busy - longest <= 0)
        if np.isfinite(room):
            solver.addConstr(held <= room / scale)
    solver.minimize()
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return None
    if status != highspy.HighsModelStatus.kOptimal:
        raise InternalError(f"HiGHS ended with {status}")
    return float(solver.getInfo().objective_function_value)


def _summed(on: Callable[[int, int], Any], stages: list[int], values: Array, items: int) -> Any:
    """Sum of the values of the items on some stages."""
    return sum(float(values[item]) * on(item, stage) for item in range(items) for stage in stages)
