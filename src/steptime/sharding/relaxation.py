r"""The integer program of a sharding problem as arrays, and its solution by HiGHS.

Columns are the options node by node, then pairs of classes of options edge by edge; rows as in
:mod:`steptime.sharding.ilp`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from steptime.num import Array
from steptime.registry import require
from steptime.sharding.problem import Problem

if TYPE_CHECKING:
    from highspy import Highs

SCALE: Final = 1e3
"""Magnitude to which memory rows and the objective are scaled, because tolerances of the solver are absolute."""
CLASS_DIGITS: Final = 12
"""Decimal digits, relative to the largest entry, to which rows of a class agree."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """The relaxation in arrays; columns: options node by node, then pairs of classes edge by edge."""

    cost_s: Array
    constant_s: float
    upper: Array
    row: Array
    column: Array
    value: Array
    row_lower: Array
    row_upper: Array
    memory_rows: int
    """Number of memory rows, which are the last rows."""
    starts: Array
    """First column of each node, then the number of binaries."""
    classes: tuple[tuple[Array, Array, Array], ...]
    """For each edge: class of each option of u, class of each option of v, column of each pair of classes (-1:
    illegal)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """The result of HiGHS."""

    status: Literal["optimal", "infeasible", "stopped"]
    interrupted: bool
    values: Array
    duals_s: Array
    value_s: float
    bound_s: float


def classes_of(matrix: Array) -> tuple[Array, Array, Array, Array, Array]:
    """Split a matrix: least of each row and column, remainder by classes, class of each row and of each column.

    >>> row, column, rest, of_row, of_column = classes_of(np.array([[1.0, 2.0], [4.0, 5.0]]))
    >>> row, column, rest, of_row
    (array([1., 4.]), array([0., 1.]), array([[0.]]), array([0, 0]))
    """
    finite = np.isfinite(matrix)
    row = np.where(finite.any(axis=1), np.min(matrix, axis=1), 0.0)
    rest = matrix - row[:, None]
    column = np.where(finite.any(axis=0), np.min(rest, axis=0), 0.0)
    rest = rest - column
    largest = np.abs(matrix[finite]).max(initial=0.0) or 1.0
    key = np.where(finite, np.round(np.where(finite, rest, 0.0) / largest, CLASS_DIGITS), -1.0) + 0.0
    first_row, of_row = _distinct(key)
    first_column, of_column = _distinct(np.ascontiguousarray(key.T))
    return row, column, rest[np.ix_(first_row, first_column)], of_row, of_column


def _distinct(rows: Array) -> tuple[Array, Array]:
    """Index of the first of each distinct row, in ascending order of values, and the distinct row of each row.

    Equals ``numpy.unique`` along an axis, which is slow if most rows are equal because it sorts all of them.
    """
    known: dict[bytes, int] = {}
    of = np.array([known.setdefault(each.tobytes(), at) for at, each in enumerate(rows)])
    first = np.array(list(known.values()))
    first = first[np.lexsort(rows[first].T[::-1])]
    place = np.empty(len(rows), int)
    place[first] = np.arange(len(first))
    return first, place[of]


def model_of(problem: Problem, *, peak: bool = False) -> Model:
    """The model of a problem; with ``peak`` it minimises the memory peak instead of seconds."""
    starts = np.concatenate([[0], np.cumsum(problem.sizes, dtype=int)])
    cost = [node.cost_s.astype(float) for node in problem.nodes]
    entries = [(np.repeat(np.arange(len(cost)), problem.sizes), np.arange(starts[-1]), np.ones(starts[-1]))]
    pairs, classes, rows, columns = [], [], len(cost), int(starts[-1])
    for edge in problem.edges:
        row, column, rest, of_u, of_v = classes_of(edge.cost_s)
        cost[edge.u], cost[edge.v] = cost[edge.u] + row, cost[edge.v] + column
        r, c = np.nonzero(np.isfinite(rest))
        place = np.full(rest.shape, -1)
        place[r, c] = columns + np.arange(len(r))
        for node, at, of in ((edge.u, r, of_u), (edge.v, c, of_v)):
            entries.append((rows + at, place[r, c], np.ones(len(r))))
            entries.append((rows + of, starts[node] + np.arange(len(of)), -np.ones(len(of))))
            rows += int(of.max()) + 1
        pairs.append(rest[r, c])
        classes.append((of_u, of_v, place))
        columns += len(r)
    lower = np.zeros(rows)
    lower[: len(cost)] = 1
    memory, room = _memory_rows(problem, starts, rows, columns if peak else None)
    flat = np.concatenate([*cost, *pairs]) if cost else np.zeros(0)
    legal = np.isfinite(flat)
    least = sum(float(each[np.isfinite(each)].min()) for each in cost)
    shift = np.zeros(len(flat))
    shift[: starts[-1]] = np.repeat([each[np.isfinite(each)].min() for each in cost], problem.sizes) if cost else 0
    row_at, column_at, value = (np.concatenate(each) for each in zip(*entries, *memory, strict=True))
    return Model(
        cost_s=np.append(np.zeros(len(flat)), 1.0) if peak else np.where(legal, flat - shift, 0.0),
        constant_s=0.0 if peak else least,
        upper=np.append(np.where(legal, np.inf, 0.0), [np.inf] * peak),
        row=row_at,
        column=column_at,
        value=value,
        row_lower=np.append(lower, np.full(len(room), -np.inf)),
        row_upper=np.append(lower, room),
        memory_rows=len(room),
        starts=starts,
        classes=tuple(classes),
    )


def _memory_rows(
    problem: Problem, starts: Array, rows: int, peak: int | None
) -> tuple[list[tuple[Array, Array, Array]], Array]:
    """Entries and right-hand sides of the moments, in units of a thousandth of the limit (of 1 byte for a peak)."""
    if not problem.moments or (peak is None and not problem.limited):
        return [], np.zeros(0)
    largest, limit = problem.limit_bytes, problem.limit_bytes
    if peak is not None:
        most = [m.fixed_bytes + sum(float(np.abs(taken).max()) for _, taken in m.entries) for m in problem.moments]
        largest, limit = max(most), 0.0
    unit = (largest or 1.0) / SCALE
    out = []
    for t, moment in enumerate(problem.moments):
        for node, taken in moment.entries:
            out.append((np.full(len(taken), rows + t), starts[node] + np.arange(len(taken)), taken / unit))
        if peak is not None:
            out.append((np.array([rows + t]), np.array([peak]), -np.ones(1)))
    room = np.array([(limit - moment.fixed_bytes) / unit for moment in problem.moments])
    return out, room


def _quiet() -> Highs:
    import highspy

    class Quiet(highspy.Highs):
        """HiGHS without its banner, which the constructor prints from here."""

        def enableCallbacks(self) -> None:
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()  # type: ignore[no-untyped-call]

    return Quiet()  # type: ignore[no-untyped-call]


def run(model: Model, *, binaries: bool, gap: float, limit_s: float, start: Sequence[int] | None = None) -> Answer:
    """Solve a model with HiGHS in one thread; Ctrl-C ends it with the result so far."""
    require("highspy", "choosing shardings")
    import highspy

    scale = SCALE / (abs(model.constant_s) + np.abs(model.cost_s).max(initial=0.0) or 1.0)
    solver = _quiet()
    options: dict[str, float | str] = {
        "threads": 1,
        "parallel": "off",
        "time_limit": max(limit_s, 0.01),
        "mip_rel_gap": gap,
        "mip_abs_gap": 0.0,
    }
    options |= {"mip_feasibility_tolerance": 1e-9, "primal_feasibility_tolerance": 1e-9 if binaries else 1e-7}
    if not binaries:
        options["presolve"] = "off"  # after our reductions HiGHS's presolve takes longer than the solution
    for name, value in options.items():
        solver.setOptionValue(name, value)
    late = 0 if binaries else model.memory_rows
    solver.passModel(_lp(model, scale, binaries, late))
    if start is not None:
        columns = columns_of(model, start)
        solver.setSolution(len(columns), columns.astype(np.int32), np.ones(len(columns)))
    interrupted = _interruptible(solver)
    if late and not interrupted and solver.getModelStatus() == highspy.HighsModelStatus.kOptimal:
        # A few hundred dual pivots from the optimum without memory rows replace thousands from scratch.
        _add_rows(solver, model, late)
        interrupted = _interruptible(solver)
    status, info, solution = solver.getModelStatus(), solver.getInfo(), solver.getSolution()
    found = info.primal_solution_status == int(highspy.SolutionStatus.kSolutionStatusFeasible)
    known = {"kOptimal": "optimal", "kInfeasible": "infeasible", "kUnboundedOrInfeasible": "infeasible"}
    said = known.get(status.name, "stopped")
    bound = info.mip_dual_bound if binaries else info.objective_function_value if said == "optimal" else -math.inf
    return Answer(
        status=said,  # type: ignore[arg-type]
        interrupted=interrupted,
        values=np.array(solution.col_value) if found else np.zeros(0),
        duals_s=np.array(solution.col_dual) / scale,
        value_s=info.objective_function_value / scale if found else math.inf,
        bound_s=bound / scale,
    )


def columns_of(model: Model, choice: Sequence[int] | Array) -> Array:
    """Columns that are 1 for a choice."""
    columns: Array = model.starts[:-1] + np.asarray(choice, int)
    return columns


def _lp(model: Model, scale: float, binaries: bool, left_out: int) -> Any:
    """The model in the form of HiGHS, without the last `left_out` rows."""
    import highspy

    lp, count, rows = highspy.HighsLp(), len(model.cost_s), len(model.row_lower) - left_out
    lp.num_col_, lp.num_row_, lp.offset_ = count, rows, model.constant_s * scale
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = model.cost_s * scale, np.zeros(count), model.upper
    lp.row_lower_, lp.row_upper_ = model.row_lower[:rows], model.row_upper[:rows]
    matrix = lp.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_, matrix.index_, matrix.value_ = _by_row(model, 0, rows)
    if binaries:
        kinds = highspy.HighsVarType
        whole = int(model.starts[-1])
        lp.integrality_ = [kinds.kInteger] * whole + [kinds.kContinuous] * (count - whole)
    return lp


def _by_row(model: Model, first: int, last: int) -> tuple[Array, Array, Array]:
    """Rows ``first`` to ``last`` in compressed form: start of each row and the end, columns, values."""
    within = np.flatnonzero((model.row >= first) & (model.row < last))
    order = within[np.lexsort((model.column[within], model.row[within]))]
    counts = np.bincount(model.row[within] - first, minlength=last - first)
    return np.concatenate([[0], np.cumsum(counts)]), model.column[order], model.value[order]


def _add_rows(solver: Highs, model: Model, count: int) -> None:
    first = len(model.row_lower) - count
    start, column, value = _by_row(model, first, first + count)
    rows = (model.row_lower[first:], model.row_upper[first:])
    solver.addRows(count, *rows, len(value), start[:-1].astype(np.int32), column.astype(np.int32), value)


def _interruptible(solver: Highs) -> bool:
    """Run a solver in a thread of its own; returns True if Ctrl-C ended it."""
    solver.HandleUserInterrupt = True
    thread, interrupted = threading.Thread(target=solver.run, daemon=True), False
    thread.start()
    while thread.is_alive():
        try:
            thread.join(0.5)
        except KeyboardInterrupt:
            interrupted = True
            solver.cancelSolve()  # type: ignore[no-untyped-call]
    return interrupted


def marginals_s(problem: Problem, model: Model, duals_s: Array) -> Array:
    """Least rise of the bound, in seconds, if an option is taken; one entry per option, from reduced costs.

    An option also takes one pair of classes of each edge of its node, so the least reduced cost among these pairs is
    added to its own.
    """
    own = np.maximum(duals_s, 0.0)
    out: Array = own[: model.starts[-1]].copy()
    for edge, (of_u, of_v, place) in zip(problem.edges, model.classes, strict=True):
        pair = np.where(place >= 0, own[place], np.inf)
        out[model.starts[edge.u] : model.starts[edge.u + 1]] += pair.min(axis=1)[of_u]
        out[model.starts[edge.v] : model.starts[edge.v + 1]] += pair.min(axis=0)[of_v]
    return out


def rounded(model: Model, answer: Answer) -> Array:
    """The choice with the largest value of each node."""
    values = np.split(answer.values[: model.starts[-1]], model.starts[1:-1])
    return np.array([int(each.argmax()) for each in values], int)
