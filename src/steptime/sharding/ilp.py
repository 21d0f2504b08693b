r"""The best choice of shardings with a proof, by integer linear programming (HiGHS).

Binary $x_{vo}$ for each option, continuous $z^{uv}_{rc} \ge 0$ for each edge and each pair of classes of options, where
options are of one class if their rows (columns) of the matrix are equal up to a constant:

$$\min \sum_{v,o} c_{vo} x_{vo} + \sum_{(u,v)} \sum_{r,c} M^{uv}_{rc} z^{uv}_{rc}, \quad \sum_o x_{vo} = 1, \quad
\sum_c z^{uv}_{rc} = \sum_{o \in r} x_{uo}, \quad \sum_r z^{uv}_{rc} = \sum_{o \in c} x_{vo}, \quad
f_t + \sum_v b_{tv} \cdot x_v \le L$$

The linear relaxation is solved first: its value bounds every choice, and without a memory limit its solution is usually
integral. If it is not, the problem of only the options that it uses is solved exactly (a dive). If the gap is still too
large, options whose reduced cost exceeds it are dropped, and branch and bound solves the rest.

Source of the formulation: Zheng et al., "Alpa", arXiv 2201.12023, section 4.2, there with binaries for each pair of
options.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from steptime.num import Array
from steptime.sharding.local_search import Meter, descended
from steptime.sharding.presolve import Conflict, Reduction, presolve
from steptime.sharding.problem import Problem, feasible, memories_bytes, only, total_s
from steptime.sharding.relaxation import Answer, Model, columns_of, marginals_s, model_of, rounded, run
from steptime.units import format_bytes

GAP: Final = 0.01
"""Default gap at which a solution is good enough."""
TIME_LIMIT_S: Final = 600.0
EXACT: Final = 1e-9
"""Gap below which a solution counts as the optimum, because of rounding in sums."""
SUPPORT: Final = 1e-6
"""Values of the relaxation below this count as zero."""
NEAR: Final = (0.0, 1e-3)
"""Dives: each has the options that the relaxation uses, and those of a reduced cost up to this share of the bound."""
DIVE_S: Final = 5.0
"""Largest number of seconds of one dive."""
DESCENTS: Final = 1e6
"""Limit of evaluated options of a descent that finds a choice where the relaxation gives none (half a second)."""
DESCENT_S: Final = 1.0
"""Largest number of seconds of the search for the least memory from which a descent starts."""
LEAST_S: Final = 10.0
"""Largest number of seconds of the search for the least memory."""
PLAYS: Final = 8
"""Largest number of weightings of the moments in the search for the least memory before branch and bound."""
EVEN: Final = 1e-9
"""Weight of a moment that was not yet the tightest; breaks ties."""
ENOUGH: Final = 1e-7
"""Share of the peak below which a gap needs no further weighting."""

Reason = Literal["exhausted", "proved_optimal", "time_limit", "interrupted", "infeasible"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The reason why solving ended."""

    reason: Reason
    """``exhausted``: reductions alone solved it; ``proved_optimal``: within the gap that was asked for."""
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Size of the relaxation after reductions."""

    nodes: int = 0
    edges: int = 0
    variables: int = 0
    binaries: int = 0
    rows: int = 0
    entries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best choice that was found, with a bound on its distance from the optimum."""

    choice: tuple[int, ...] | None
    """Option of every node; None: no choice was found."""
    total_s: float
    """Seconds of the choice, infinite without one."""
    bound_s: float
    """Lower bound in seconds of every choice that fits."""
    relaxation_s: float
    """Bound of the linear relaxation alone."""
    stop: Stop
    cpu_s: float
    build_cpu_s: float
    """CPU seconds of reductions and models; the rest of ``cpu_s`` is HiGHS."""
    size: ModelSize
    least_limit_bytes: float | None = None
    """The smallest sufficient memory limit in bytes, if memory makes the problem infeasible."""

    @property
    def gap(self) -> float:
        """Upper bound of the excess over the best choice, as a share of the bound."""
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


class _Search:
    """The state of :func:`solve`: the best choice and the best bound so far, of the reduced problem."""

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
        """Keep a choice of the reduced problem if it is legal, fits, and is the fastest so far."""
        total = total_s(self.problem, choice)
        if total < self.total and feasible(self.problem, choice):
            self.best, self.total = np.asarray(choice, int), total

    def run(self, model: Model, limit_s: float, constant_s: float, start: Sequence[int] | None = None) -> Answer:
        """Branch and bound; the constant is part of the objective, so that gaps are shares of the total."""
        began = time.process_time()
        whole = replace(model, constant_s=model.constant_s + constant_s)
        answer = run(whole, binaries=True, gap=self.gap / 4, limit_s=min(limit_s, self.left_s), start=start)
        self.highs_s += time.process_time() - began
        self.interrupted |= answer.interrupted
        return answer

    def relax(self) -> Answer | None:
        """Solve the relaxation, raise the bound, and offer its rounded choice; None: it has no solution."""
        model = self.model = model_of(self.problem)
        self.size = ModelSize(
            nodes=len(self.problem.nodes),
            edges=len(self.problem.edges),
            variables=len(model.cost_s),
            binaries=int(model.starts[-1]),
            rows=len(model.row_lower),
            entries=len(model.value),
        )
        self.bound = max(self.bound, model.constant_s)
        began = time.process_time()
        answer = run(model, binaries=False, gap=0.0, limit_s=self.left_s)
        self.highs_s += time.process_time() - began
        self.interrupted |= answer.interrupted
        if answer.status == "infeasible":
            return None
        if answer.status == "optimal":
            self.relaxation = answer.bound_s
            self.bound = max(self.bound, answer.bound_s)
            self.offer(rounded(self.model, answer))
        return answer

    def within(self, keep: Array, limit_s: float) -> float:
        """Solve the problem with only the options of a mask; returns the bound that this proves for them."""
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
            self.offer(small.recover(rounded(model, answer)))
        return math.inf if answer.status == "infeasible" else answer.bound_s - self.base

    def descend(self) -> None:
        """Offer the best choice of coordinate descents, one from the least memory so that it may fit."""
        least = least_memory(self.problem, time_limit_s=DESCENT_S) if self.problem.limited else None
        found = descended(self.problem, [] if least is None else [least.choice], DESCENTS)
        if found is not None:
            self.offer(found)

    def improve(self, answer: Answer) -> None:
        """Dive, then branch and bound over the options that reduced costs leave, until the gap or the time limit."""
        marginal = np.zeros(int(self.model.starts[-1]))
        if answer.status == "optimal":
            marginal = marginals_s(self.problem, self.model, answer.duals_s)
            used = answer.values[: len(marginal)] > SUPPORT
            for share in NEAR:
                if share:
                    self.descend()
                if not self.ended:
                    near = share * abs(self.bound + self.base)
                    self.within(used | (marginal <= near) if share else used, min(DIVE_S, self.limit_s / 4))
        if not self.ended:
            keep = marginal <= (self.total - self.bound) * (1 + 1e-6) + EXACT * abs(self.bound + self.base)
            if self.best is not None:
                keep[columns_of(self.model, self.best)] = True
            self.bound = max(self.bound, min(self.within(keep, self.left_s), self.total))


def solve(
    problem: Problem,
    *,
    gap: float = GAP,
    time_limit_s: float = TIME_LIMIT_S,
    start: Sequence[int] | Array | None = None,
) -> Solution:
    """The best choice, proved to within a gap, or the reason why there is none.

    `start` is a first choice, such as that of a baseline. Options that cannot beat it are dropped. It is the answer if
    the relaxation proves it within the gap, or if nothing better is found in time.

    >>> from steptime.sharding.problem import Edge, Node
    >>> costs = (np.array([1.0, 2.0]), np.array([3.0, 1.0]))
    >>> nodes = tuple(Node(name=name, cost_s=cost) for name, cost in zip("ab", costs))
    >>> found = solve(Problem(nodes=nodes, edges=(Edge(u=0, v=1, cost_s=np.array([[0.0, 5.0], [5.0, 0.0]])),)))
    >>> found.choice, found.total_s, found.bound_s, found.stop.reason
    ((1, 1), 3.0, 3.0, 'exhausted')
    """
    began, until, free = time.process_time(), time.perf_counter() + time_limit_s, None
    if problem.limited:
        # Without the limit reductions go further; the solution is also the answer if it fits.
        free = solve(
            replace(problem, moments=(), limit_bytes=math.inf), gap=gap, time_limit_s=time_limit_s / 4, start=start
        )
        if free.stop.reason == "proved_optimal" and feasible(problem, free.choice or ()):
            return free
        time_limit_s = until - time.perf_counter()
    reduction = presolve(problem)
    if isinstance(reduction, Conflict):
        return _infeasible(problem, began, reduction.because)
    search = _Search(reduction, gap, time_limit_s)
    if free is not None:
        search.bound = free.bound_s - search.base
        search.highs_s, search.interrupted = free.cpu_s - free.build_cpu_s, free.stop.reason == "interrupted"
    if not reduction.problem.nodes:
        search.best, search.total, search.bound = np.zeros(0, int), 0.0, 0.0
        search.relaxation = 0.0
    else:
        begin = None if start is None else reduction.reduced(start)
        if begin is not None:
            search.offer(begin)
        answer = None if search.interrupted else search.relax()
        if answer is None and not search.interrupted:
            return _infeasible(problem, began, "the relaxation has no solution")
        if answer is not None and not search.ended:
            search.improve(answer)
        if search.best is None:
            search.descend()
    if search.best is None and not search.interrupted and search.left_s > 0:
        return _infeasible(problem, began, "branch and bound found none")
    return _solution(problem, search, start, began)


def exact(meter: Meter, rng: np.random.Generator) -> None:
    """Offer the solution of the integer linear program to the default gap."""
    found = solve(meter.problem, time_limit_s=max(meter.left_s, 0.01))
    if found.choice is not None:
        meter.offer(found.choice)


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
    """The solution of an infeasible problem; if memory is the reason, with the smallest sufficient limit."""
    least = least_memory(problem) if problem.limited else None
    if least is not None:
        least_text, limit_text = format_bytes(least.peak_bytes), format_bytes(problem.limit_bytes)
        because = f"{least.moment} needs {least_text} or more; the limit is {limit_text}"
        because += "" if least.proved else " (the least is not proved)"
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
        least_limit_bytes=None if least is None else least.peak_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Least:
    """The choice with the lowest memory peak that was found."""

    choice: tuple[int, ...]
    moment: str
    """Name of the moment with the peak."""
    peak_bytes: float
    """Memory at the peak."""
    bound_bytes: float
    """Lower bound of the peak of every legal choice."""

    @property
    def proved(self) -> bool:
        """True if no choice has a lower peak."""
        return self.peak_bytes - self.bound_bytes <= ENOUGH * self.peak_bytes


def least_memory(problem: Problem, *, time_limit_s: float = LEAST_S) -> Least | None:
    r"""The choice with the lowest memory peak, regardless of time.

    For weights $w_t \ge 0$ of the moments that add up to 1, $\max_t B_t \ge \sum_t w_t B_t$. Minimising the weighted
    sum is a problem without a limit, which reductions mostly solve: it bounds all peaks, and its choice is near the
    best. The weight of a moment is the number of times it was the tightest so far (fictitious play). Branch and bound
    closes the remaining gap if time is left.

    None: no choice is legal with any memory, or none was found in time.
    """
    until = time.perf_counter() + time_limit_s
    fixed = np.array([moment.fixed_bytes for moment in problem.moments])
    counts, found = np.zeros(len(fixed)), None
    for _ in range(PLAYS):
        weights = (counts + EVEN) / (counts + EVEN).sum()
        solved = solve(_weighted(problem, weights), gap=EXACT, time_limit_s=until - time.perf_counter())
        if solved.choice is None:
            break
        found, tightest = _lower(problem, found, solved.choice, solved.bound_s + float(weights @ fixed))
        counts[tightest] += 1
        if found.proved or time.perf_counter() > until:
            break
    if found is None or found.proved or time.perf_counter() > until:
        return found
    model, left_s = model_of(problem, peak=True), until - time.perf_counter()
    answer = run(model, binaries=True, gap=EXACT, limit_s=left_s, start=found.choice)
    if len(answer.values):
        found, _ = _lower(problem, found, tuple(map(int, rounded(model, answer))), -math.inf)
    return replace(found, bound_bytes=found.peak_bytes) if answer.status == "optimal" else found


def _lower(problem: Problem, best: Least | None, choice: tuple[int, ...], bound_bytes: float) -> tuple[Least, int]:
    """The better of two choices with the better of two bounds, and the tightest moment of the second choice."""
    sizes = memories_bytes(problem, np.array([choice]))[0]
    at = int(sizes.argmax())
    new = Least(choice=choice, moment=problem.moments[at].name, peak_bytes=float(sizes[at]), bound_bytes=bound_bytes)
    if best is not None:
        better = min(best, new, key=lambda each: each.peak_bytes)
        new = replace(better, bound_bytes=max(best.bound_bytes, bound_bytes))
    return new, at


def _weighted(problem: Problem, weights: Array) -> Problem:
    """The problem without a limit whose costs are bytes: the weighted sum of memory over the moments."""
    nodes = tuple(
        replace(node, cost_s=np.where(np.isfinite(node.cost_s), taken @ weights[moments], np.inf))
        for node, (moments, taken) in zip(problem.nodes, problem.held, strict=True)
    )
    edges = tuple(replace(edge, cost_s=np.where(np.isfinite(edge.cost_s), 0.0, np.inf)) for edge in problem.edges)
    return Problem(nodes=nodes, edges=edges)
