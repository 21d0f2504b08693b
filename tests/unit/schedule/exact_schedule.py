"""The least span of a tiny pipeline as a mixed-integer program of its own, for HiGHS: an oracle of the search."""

from __future__ import annotations

from itertools import combinations, product

import highspy
import numpy as np

Pass = tuple[str, int, int]


def least_span_s(
    stages: np.ndarray, m: int, seconds: dict[str, np.ndarray], message_s: float, limit: int, slack: float = 1e-6
) -> float:
    """Least span of the rank with the longest, over all start times of all passes but the first of each rank, which
    starts as soon as it can.

    Args:
        stages: stage by rank and chunk.
        m: micro-batches.
        seconds: of F, I and W by stage.
        message_s: of a message between two ranks.
        limit: activations of a stage that a rank holds at most.
        slack: gap at which the solver stops, as a share.
    """
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("mip_rel_gap", slack)
    count = stages.size
    owner = {int(stage): rank for rank, row in enumerate(stages) for stage in row}
    most = float(m * sum(each.sum() for each in seconds.values()) + 2 * m * count * message_s)
    start = {
        (kind, stage, number): solver.addVariable(0, most)
        for kind, stage, number in product("FIW", range(count), range(m))
    }

    def takes(one: Pass) -> float:
        return float(seconds[one[0]][one[1]])

    _chains(solver, start, takes, owner, message_s)
    span, begun = solver.addVariable(0, most), 0.0
    for row in stages:
        solver.addConstr(start["F", int(row[0]), 0] == begun)
        begun += takes(("F", int(row[0]), 0)) + message_s
        own = [one for one in start if one[1] in row]
        before = _orders(solver, start, own, takes, most)
        for one in own:
            if one[0] == "F":
                held = sum(before[other, one] for other in own if other[0] == "F" and other != one)
                freed = sum(before[other, one] for other in own if other[0] == "W")
                solver.addConstr(held - freed <= limit - 1 + 0 * span)
            for other in own:
                solver.addConstr(span >= start[one] + takes(one) - start[other])
    solver.minimize(span)
    assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return float(solver.getInfo().objective_function_value)


def _chains(solver, start, takes, owner, message_s):  # type: ignore[no-untyped-def]
    """Each pass is behind what it needs, and behind those of its kind and stage with smaller numbers."""

    def after(one: Pass, other: Pass, lag: float = 0.0) -> None:
        solver.addConstr(start[other] - start[one] >= takes(one) + lag)

    for kind, stage, number in start:
        if number:
            after((kind, stage, number - 1), (kind, stage, number))
    for _, stage, number in [one for one in start if one[0] == "F"]:
        after(("F", stage, number), ("I", stage, number))
        after(("I", stage, number), ("W", stage, number))
        if stage:
            lag = message_s * (owner[stage] != owner[stage - 1])
            after(("F", stage - 1, number), ("F", stage, number), lag)
            after(("I", stage, number), ("I", stage - 1, number), lag)


def _orders(solver, start, own, takes, most):  # type: ignore[no-untyped-def]
    """A variable for each two passes of a rank: 1, if the first is before the second."""
    before = {}
    for one, other in combinations(own, 2):
        first = solver.addBinary()
        solver.addConstr(start[other] - start[one] - (takes(one) + most) * first >= -most)
        solver.addConstr(start[one] - start[other] + (takes(other) + most) * first >= takes(other))
        before[one, other], before[other, one] = first, 1 - first
    return before
