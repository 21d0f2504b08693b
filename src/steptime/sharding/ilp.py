r"""The best choice of shardings with a proof, by integer linear programming (HiGHS).

Binary $x_{vo}$ for each option, continuous $z^{uv}_{rc} \ge 0$ for each edge and each pair of classes of options, where
options are of one class if their rows (columns) of the matrix are equal up to a constant:

$$\min \sum_{v,o} c_{vo} x_{vo} + \sum_{(u,v)} \sum_{r,c} M^{uv}_{rc} z^{uv}_{rc}, \quad \sum_o x_{vo} = 1, \quad
\sum_c z^{uv}_{rc} = \sum_{o \in r} x_{uo}, \quad \sum_r z^{uv}_{rc} = \sum_{o \in c} x_{vo}, \quad
f_t + \sum_v b_{tv} \cdot x_v \le L$$

The linear relaxation is solved first: its value bounds every choice, and without a limit of memory its solution is
integral as a rule. Where it is not, the options that it uses are a small problem of their own, solved exactly (a dive).
If the gap is still too large, options whose reduced cost exceeds it are dropped, and branch and bound does the rest.

Source of the formulation: Zheng et al., "Alpa", arXiv 2201.12023, section 4.2, there with binaries for each pair of
options.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from steptime.num import Array
from steptime.sharding.presolve import Conflict, Reduction, presolve
from steptime.sharding.problem import Problem, feasible, memory_bytes, only, total_s

if TYPE_CHECKING:
    from highspy import Highs

GAP: Final = 0.01
"""Gap at which a solution is good enough unless asked otherwise."""
TIME_LIMIT_S: Final = 600.0
EXACT: Final = 1e-9
"""Gap below which a solution counts as the optimum: rounding of sums."""
SUPPORT: Final = 1e-6
"""Values of the relaxation below this are zero."""
NEAR: Final = (0.0, 1e-3)
"""Dives: options whose reduced cost is at most this share of the bound, with those that the relaxation uses."""
DIVE_S: Final = 5.0
"""Most seconds of one dive."""
SCALE: Final = 1e3
"""What the constraint of memory and the objective are scaled to: tolerances of the solver are absolute."""
CLASS_DIGITS: Final = 12
"""Digits, relative to the largest entry, in which rows of one class agree."""

Reason = Literal["exhausted", "proved_optimal", "time_limit", "interrupted", "infeasible"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Why solving ended."""

    reason: Reason
    """``exhausted``: reductions alone solved it; ``proved_optimal``: within the gap that was asked for."""
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Of the relaxation, after reductions."""

    nodes: int = 0
    edges: int = 0
    variables: int = 0
    binaries: int = 0
    rows: int = 0
    entries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best choice that was found, and how far from the best it can be."""

    choice: tuple[int, ...] | None
    """Option of every node; None: there is none."""
    total_s: float
    """Seconds of the choice, infinite without one."""
    bound_s: float
    """No choice that fits is faster."""
    relaxation_s: float
    """Bound of the linear relaxation alone."""
    stop: Stop
    cpu_s: float
    build_cpu_s: float
    """CPU seconds of reductions and models; the rest of ``cpu_s`` is HiGHS."""
    size: ModelSize
    least_limit_bytes: float | None = None
    """Where memory is what cannot be met: the smallest limit that would do."""

    @property
    def gap(self) -> float:
        """Most share of the bound by which the choice can exceed the best one."""
        return gap_of(self.total_s, self.bound_s)


def gap_of(total_s: float, bound_s: float) -> float:
    """Share of the bound by which a total exceeds it, at least 0.

    >>> gap_of(102.0, 100.0), gap_of(1.0, 1.0), gap_of(math.inf, 1.0)
    (0.02, 0.0, inf)
    """
    if not math.isfinite(total_s):
        return math.inf
    over = max(total_s - bound_s, 0.0)
    return over / abs(bound_s) if bound_s and over else math.inf if over else 0.0


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
    """Rows of moments, which are the last."""
    starts: Array
    """First column of each node, and the number of all binaries."""
    classes: tuple[tuple[Array, Array, Array], ...]
    """Edge -> class of each option of u, of each of v, and column of each pair of classes; -1: illegal."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """What HiGHS says."""

    status: Literal["optimal", "infeasible", "stopped"]
    interrupted: bool
    values: Array
    duals_s: Array
    value_s: float
    bound_s: float


def classes_of(matrix: Array) -> tuple[Array, Array, Array, Array, Array]:
    """Least seconds of each row and column, the rest by class of row and of column, the class of each row and column.

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
    key = np.where(finite, np.round(np.where(finite, rest, 0.0) / largest, CLASS_DIGITS), -1.0)
    _, first_row, of_row = np.unique(key, axis=0, return_index=True, return_inverse=True)
    _, first_column, of_column = np.unique(key, axis=1, return_index=True, return_inverse=True)
    return row, column, rest[np.ix_(first_row, first_column)], of_row.ravel(), of_column.ravel()


def model_of(problem: Problem, *, peak: bool = False) -> Model:
    """The model of a problem; with ``peak`` that of the least memory, in which seconds count nothing."""
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
    unit = (problem.limit_bytes or 1.0) / SCALE if peak is None else _peak_unit(problem)
    limit = problem.limit_bytes if peak is None else 0.0
    out = []
    for t, moment in enumerate(problem.moments):
        for node, taken in moment.entries:
            out.append((np.full(len(taken), rows + t), starts[node] + np.arange(len(taken)), taken / unit))
        if peak is not None:
            out.append((np.array([rows + t]), np.array([peak]), -np.ones(1)))
    room = np.array([(limit - moment.fixed_bytes) / unit for moment in problem.moments])
    return out, room


def _peak_unit(problem: Problem) -> float:
    most = [m.fixed_bytes + sum(float(np.abs(taken).max()) for _, taken in m.entries) for m in problem.moments]
    return (max(most) or 1.0) / SCALE


def _quiet() -> Highs:
    import highspy

    class Quiet(highspy.Highs):
        """HiGHS without its banner, which the constructor prints from here."""

        def enableCallbacks(self) -> None:
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()  # type: ignore[no-untyped-call]

    return Quiet()  # type: ignore[no-untyped-call]


def run(model: Model, *, binaries: bool, gap: float, limit_s: float, start: Sequence[int] | None = None) -> Answer:
    """Solves a model with HiGHS in one thread; Ctrl-C ends it with what there is."""
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
    for name, value in options.items():
        solver.setOptionValue(name, value)
    late = 0 if binaries else model.memory_rows
    solver.passModel(_lp(model, scale, binaries, late))
    if start is not None:
        columns = _columns(model, start)
        solver.setSolution(len(columns), columns.astype(np.int32), np.ones(len(columns)))
    interrupted = _interruptible(solver)
    if late and not interrupted and solver.getModelStatus() == highspy.HighsModelStatus.kOptimal:
        # From the optimum without memory a few hundred dual pivots do what takes thousands from nothing.
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


def _columns(model: Model, choice: Sequence[int] | Array) -> Array:
    """Columns that are one for a choice."""
    columns: Array = model.starts[:-1] + np.asarray(choice, int)
    return columns


def _lp(model: Model, scale: float, binaries: bool, left_out: int) -> Any:
    """What HiGHS reads, without the last `left_out` rows."""
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
    """Start of each row and one past the end, columns, values."""
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
    """Runs a solver in a thread of its own; whether Ctrl-C ended it."""
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
    """Seconds by which the bound rises at least if an option is taken, option by option, from reduced costs.

    An option that is taken also takes one pair of classes of each edge of its node, so the least reduced cost among the
    pairs adds to its own.
    """
    own = np.maximum(duals_s, 0.0)
    out: Array = own[: model.starts[-1]].copy()
    for edge, (of_u, of_v, place) in zip(problem.edges, model.classes, strict=True):
        pair = np.where(place >= 0, own[place], np.inf)
        out[model.starts[edge.u] : model.starts[edge.u + 1]] += pair.min(axis=1)[of_u]
        out[model.starts[edge.v] : model.starts[edge.v + 1]] += pair.min(axis=0)[of_v]
    return out


class _Search:
    """One run of :func:`solve`: the best choice and the best bound so far, in terms of the reduced problem."""

    def __init__(self, reduction: Reduction, gap: float, limit_s: float) -> None:
        self.reduction, self.problem, self.gap = reduction, reduction.problem, max(gap, EXACT)
        self.started, self.limit_s = time.perf_counter(), limit_s
        self.build_s = self.highs_s = 0.0
        self.best: Array | None = None
        self.total = math.inf
        self.bound = self.relaxation = -math.inf
        self.interrupted = False
        self.size = ModelSize(nodes=len(self.problem.nodes), edges=len(self.problem.edges))

    @property
    def left_s(self) -> float:
        return self.limit_s - (time.perf_counter() - self.started)

    @property
    def ended(self) -> bool:
        return (
            self.interrupted or self.left_s <= 0 or gap_of(self.total + self.base, self.bound + self.base) <= self.gap
        )

    @property
    def base(self) -> float:
        return self.reduction.constant_s

    def offer(self, choice: Array | Sequence[int]) -> None:
        """Keeps a choice of the reduced problem if it is legal, fits, and is the best."""
        total = total_s(self.problem, choice)
        if total < self.total and feasible(self.problem, choice):
            self.best, self.total = np.asarray(choice, int), total

    def run(self, model: Model, limit_s: float, constant_s: float, start: Sequence[int] | None = None) -> Answer:
        """Branch and bound; the constant belongs to the objective, so that gaps are shares of the whole."""
        began = time.process_time()
        whole = replace(model, constant_s=model.constant_s + constant_s)
        answer = run(whole, binaries=True, gap=self.gap / 4, limit_s=min(limit_s, self.left_s), start=start)
        self.highs_s += time.process_time() - began
        self.interrupted |= answer.interrupted
        return answer

    def relax(self) -> Answer | None:
        """The relaxation, its bound and its choice if it is integral; None: it has no solution."""
        model = self.model = model_of(self.problem)
        self.size = ModelSize(
            nodes=len(self.problem.nodes),
            edges=len(self.problem.edges),
            variables=len(model.cost_s),
            binaries=int(model.starts[-1]),
            rows=len(model.row_lower),
            entries=len(model.value),
        )
        self.bound = model.constant_s
        began = time.process_time()
        answer = run(model, binaries=False, gap=0.0, limit_s=self.left_s)
        self.highs_s += time.process_time() - began
        self.interrupted |= answer.interrupted
        if answer.status == "infeasible":
            return None
        if answer.status == "optimal":
            self.bound = self.relaxation = answer.bound_s
            self.offer(_rounded(self.model, answer))
        return answer

    def within(self, keep: Array, limit_s: float) -> float:
        """Solves the problem with the options of a mask; returns the bound that this proves for them."""
        allowed = [mask.nonzero()[0] for mask in np.split(keep, self.model.starts[1:-1])]
        nodes = tuple(only(node, options) for node, options in zip(self.problem.nodes, allowed, strict=True))
        small = presolve(
            Problem(
                nodes=nodes,
                edges=self.problem.edges,
                moments=self.problem.moments,
                limit_bytes=self.problem.limit_bytes,
            )
        )
        if isinstance(small, Conflict):
            return math.inf
        if not small.problem.nodes:
            self.offer(small.recover([]))
            return small.constant_s
        model = model_of(small.problem)
        start = None if self.best is None else small.reduced(self.best)
        answer = self.run(model, limit_s, small.constant_s + self.base, start)
        if len(answer.values):
            self.offer(small.recover(_rounded(model, answer)))
        return math.inf if answer.status == "infeasible" else answer.bound_s - self.base

    def improve(self, answer: Answer) -> None:
        """Dives, then branch and bound over what reduced costs leave, until the gap is met or time is up."""
        marginal = np.zeros(int(self.model.starts[-1]))
        if answer.status == "optimal":
            marginal = marginals_s(self.problem, self.model, answer.duals_s)
            used = answer.values[: len(marginal)] > SUPPORT
            for share in NEAR:
                if not self.ended:
                    near = share * abs(self.bound + self.base)
                    self.within(used | (marginal <= near) if share else used, DIVE_S)
        if not self.ended:
            keep = marginal <= (self.total - self.bound) * (1 + 1e-6) + EXACT * abs(self.bound + self.base)
            if self.best is not None:
                keep[_columns(self.model, self.best)] = True
            self.bound = max(self.bound, min(self.within(keep, self.left_s), self.total))


def _rounded(model: Model, answer: Answer) -> Array:
    """The largest value of each node."""
    values = np.split(answer.values[: model.starts[-1]], model.starts[1:-1])
    return np.array([int(each.argmax()) for each in values], int)


def solve(
    problem: Problem,
    *,
    gap: float = GAP,
    time_limit_s: float = TIME_LIMIT_S,
    start: Sequence[int] | Array | None = None,
) -> Solution:
    """The best choice, proved to within a gap, or why there is none.

    `start` is a choice to begin from, such as that of a baseline: what cannot be better is dropped, and it is the
    answer where the relaxation proves it near enough, or where nothing better turns up in time.

    >>> from steptime.sharding.problem import Edge, Node
    >>> costs = (np.array([1.0, 2.0]), np.array([3.0, 1.0]))
    >>> nodes = tuple(Node(name=name, cost_s=cost) for name, cost in zip("ab", costs))
    >>> found = solve(Problem(nodes=nodes, edges=(Edge(u=0, v=1, cost_s=np.array([[0.0, 5.0], [5.0, 0.0]])),)))
    >>> found.choice, found.total_s, found.bound_s, found.stop.reason
    ((1, 1), 3.0, 3.0, 'exhausted')
    """
    began = time.process_time()
    reduction = presolve(problem)
    if isinstance(reduction, Conflict):
        return _infeasible(problem, began, reduction.because)
    search = _Search(reduction, gap, time_limit_s)
    if not reduction.problem.nodes:
        search.best, search.total, search.bound = np.zeros(0, int), 0.0, 0.0
        search.relaxation = 0.0
    else:
        begin = None if start is None else reduction.reduced(start)
        if begin is not None:
            search.offer(begin)
        answer = search.relax()
        if answer is None:
            return _infeasible(problem, began, "the relaxation has no solution")
        if not search.ended:
            search.improve(answer)
    if search.best is None and not search.interrupted and search.left_s > 0:
        return _infeasible(problem, began, "branch and bound found none")
    return _solution(problem, search, start, began)


def _solution(problem: Problem, search: _Search, start: Sequence[int] | Array | None, began: float) -> Solution:
    choices = [] if search.best is None else [search.reduction.recover(search.best)]
    if start is not None and feasible(problem, start):
        choices.append(np.asarray(start, int))
    best = min(choices, key=lambda choice: total_s(problem, choice), default=None)
    total = math.inf if best is None else total_s(problem, best)
    bound = min(search.bound + search.base, total)
    near = gap_of(total, bound)
    stop = Stop(reason="proved_optimal", because=f"no choice is faster by more than {near:.2g} of the bound")
    if not search.problem.nodes:
        stop = Stop(reason="exhausted", because="reductions solved it exactly")
    elif near > search.gap:
        reason: Reason = "interrupted" if search.interrupted else "time_limit"
        stop = Stop(reason=reason, because=f"ended with a gap of {near:.2g}")
    cpu = time.process_time() - began
    return Solution(
        choice=None if best is None else tuple(map(int, best)),
        total_s=total,
        bound_s=bound,
        relaxation_s=min(search.relaxation + search.base, total),
        stop=stop,
        cpu_s=cpu,
        build_cpu_s=cpu - search.highs_s,
        size=search.size,
    )


def _infeasible(problem: Problem, began: float, because: str) -> Solution:
    """What makes a problem infeasible: its rules, or memory, then with the least limit that would do."""
    least = least_limit(problem) if problem.limited else None
    if least is not None:
        name, size, proved = least
        because = f"{name} needs {size:,.0f} bytes or more; the limit is {problem.limit_bytes:,.0f}"
        because += "" if proved else " (the least is not proved)"
    cpu = time.process_time() - began
    return Solution(
        choice=None,
        total_s=math.inf,
        bound_s=math.inf,
        relaxation_s=math.inf,
        stop=Stop(reason="infeasible", because=because),
        cpu_s=cpu,
        build_cpu_s=0.0,
        size=ModelSize(),
        least_limit_bytes=None if least is None else least[1],
    )


def least_limit(problem: Problem, *, time_limit_s: float = 30.0) -> tuple[str, float, bool] | None:
    """The tightest moment and the bytes there of the choice with the least peak, and whether that is proved.

    None: no choice is legal, whatever memory there is.
    """
    model = model_of(problem, peak=True)
    answer = run(model, binaries=True, gap=EXACT, limit_s=time_limit_s)
    if not len(answer.values):
        return None
    sizes = memory_bytes(problem, _rounded(model, answer))
    name = max(sizes, key=lambda each: sizes[each])
    return name, sizes[name], answer.status == "optimal"
