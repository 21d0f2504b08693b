r"""The fastest schedule of a small graph within a memory limit, by a mixed-integer program.

With binary $R_{t,i}$ (stage $t$ runs node $i$) and $S_{t,i}$ (node $i$ is kept into stage $t$), $M$ the bytes of
results, $U_{t,k}$ the bytes while stage $t$ runs node $k$, and $F_{t,i,k}$ (node $i$ is released after the run of $k$):

$$\min \sum_{t,i} c_i R_{t,i} \quad \text{subject to} \quad
R_{t,t} = 1, \quad R_{t,j} \le R_{t,i} + S_{t,i} \ (j \text{ reads } i), \quad S_{t+1,i} \le R_{t,i} + S_{t,i}$$
$$U_{t,0} = M_c + \sum_i M_i S_{t,i} + M_0 R_{t,0}, \quad
U_{t,k+1} = U_{t,k} - \sum_{i \in \{k\} \cup \text{reads}(k)} M_i F_{t,i,k} + M_{k+1} R_{t,k+1}, \quad
U_{t,k} + \text{transient} \le \text{limit}$$
$$F_{t,i,k} \le R_{t,k}, \quad F_{t,i,k} \le 1 - S_{t+1,i}, \quad F_{t,i,k} \le 1 - R_{t,j} \ (j > k \text{ reads } i)$$

The last line replaces the paper's count of hazards: it is tighter, and lets $F$ be continuous. A by-product runs only
with its parent: $R_{t,k+1} \le R_{t,k}$; a result that holds others is kept with them: $S_{t,j} \le S_{t,i}$.

Source: Jain et al., MLSys 2020, arXiv 1910.02653, section 4.

**Where it agrees with the chain solver.** On the graph of a chain
(:func:`~steptime.captured.rematerialisation.dag.dag_of`) the space of this program contains that of
:mod:`~steptime.captured.rematerialisation.rotor`, with the same bytes and seconds, transients and gradients included,
so its optimum is never slower. It is the same where no schedule gains by releasing a checkpoint early: where all
boundaries, gradients and saved activations have one size each and there are no transients (times may differ). On
unequal chains it is at times faster.

The size of the program grows with the square of the number of nodes times their reads: chains of up to nine segments
take seconds to a minute. It needs SciPy, which is in the extra ``calibrate``.
"""

from __future__ import annotations

import importlib
import math
from collections import defaultdict
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from steptime.captured.rematerialisation.chain import check_limit, check_number, common_divisor
from steptime.captured.rematerialisation.dag import Dag, DagSimulation, DagStage, simulate_dag
from steptime.errors import UserError
from steptime.num import Array

Term = tuple[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvedOptimal:
    """No schedule is faster by more than this fraction of the time."""

    gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit:
    """The time ran out; the best schedule known is at most this fraction of its time above the bound."""

    gap: float
    """Infinite where no schedule was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSchedule:
    """Proved: no schedule fits."""

    limit_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DagSolution:
    """What the program found."""

    stop: ProvedOptimal | TimeLimit | NoSchedule
    schedule: tuple[DagStage, ...] | None
    run: DagSimulation | None


def solve_dag(dag: Dag, limit_bytes: float, *, time_limit_s: float = 60.0, gap: float = 0.0) -> DagSolution:
    """The fastest schedule of a graph, or the best that was found in ``time_limit_s``.

    Raises :class:`~steptime.errors.FieldError` for a limit that is negative or no number, and
    :class:`~steptime.errors.UserError` where SciPy is not installed.
    """
    check_limit(limit_bytes)
    check_number("checkmate", "time_limit_s", time_limit_s, positive=True)
    check_number("checkmate", "gap", gap)
    optimize = _scipy("optimize")
    most = dag.constant_bytes + sum(node.result_bytes + node.transient_bytes for node in dag.nodes)
    program = _Program(dag, min(limit_bytes, most))
    result = optimize.milp(
        program.cost, integrality=program.integrality, bounds=optimize.Bounds(program.low, program.high),
        constraints=program.constraints(optimize), options={"time_limit": time_limit_s, "mip_rel_gap": gap},
    )  # fmt: skip
    if result.status == 2:
        return DagSolution(stop=NoSchedule(limit_bytes=limit_bytes), schedule=None, run=None)
    if result.x is None:
        return DagSolution(stop=TimeLimit(gap=math.inf), schedule=None, run=None)
    schedule = program.schedule(result.x)
    reached = float(result.mip_gap or 0.0)
    stop = ProvedOptimal(gap=reached) if result.status == 0 else TimeLimit(gap=reached)
    return DagSolution(stop=stop, schedule=schedule, run=simulate_dag(dag, schedule))


def _scipy(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"scipy.{name}")
    except ImportError:
        raise UserError("the exact solver of graphs needs SciPy", hint="pip install 'steptime[calibrate]'") from None


class _Program:
    """Variables and rows of the program; bytes are in a unit that keeps whole numbers whole."""

    def __init__(self, dag: Dag, limit_bytes: float) -> None:
        self.dag, self.nodes, self.stages = dag, dag.nodes, dag.stages
        self.scale = _unit(dag, limit_bytes)
        self.bytes = [node.result_bytes / self.scale for node in dag.nodes]
        self.transient = [node.transient_bytes / self.scale for node in dag.nodes]
        self.limit = limit_bytes / self.scale
        self.costs: list[float] = []
        self.lows: list[float] = []
        self.highs: list[float] = []
        self.integers: list[int] = []
        self.rows = _Rows()
        self.readers: dict[int, list[int]] = defaultdict(list)
        for k, node in enumerate(dag.nodes):
            for i in node.reads:
                self.readers[i].append(k)
        self.run: dict[tuple[int, int], int] = {}
        self.keep: dict[tuple[int, int], int] = {}
        self._variables()
        for t in range(len(self.stages)):
            self._legality(t)
            self._memory(t)

    def last(self, t: int) -> int:
        """The last node that a stage may run."""
        own = self.stages[t]
        return own + self.dag.has_by_product(own)

    def variable(self, cost: float, low: float, high: float, integer: bool) -> int:
        self.costs.append(cost)
        self.lows.append(low)
        self.highs.append(high)
        self.integers.append(int(integer))
        return len(self.costs) - 1

    def _variables(self) -> None:
        for t, own in enumerate(self.stages):
            for i in range(self.last(t) + 1):
                node = self.nodes[i]
                again = 0.0 if node.once and i != own else 1.0
                self.run[t, i] = self.variable(node.time_s, float(i == own), again, True)
                if t and i <= self.last(t - 1):
                    self.keep[t, i] = self.variable(0.0, 0.0, 1.0, True)

    def kept(self, t: int, i: int) -> list[Term]:
        """The term of S[t, i], or none where it cannot be kept."""
        return [(self.keep[t, i], 1.0)] if (t, i) in self.keep else []

    def _legality(self, t: int) -> None:
        for j in range(self.last(t) + 1):
            for i in self.nodes[j].reads:
                self.rows.at_most([(self.run[t, j], 1.0), (self.run[t, i], -1.0), *_minus(self.kept(t, i))], 0.0)
            if self.nodes[j].by_product:
                self.rows.at_most([(self.run[t, j], 1.0), (self.run[t, j - 1], -1.0)], 0.0)
            for i in self.nodes[j].holds:
                if (t + 1, j) in self.keep:
                    self.rows.at_most([(self.keep[t + 1, j], 1.0), (self.keep[t + 1, i], -1.0)], 0.0)
            if (t + 1, j) in self.keep:
                self.rows.at_most(
                    [(self.keep[t + 1, j], 1.0), (self.run[t, j], -1.0), *_minus(self.kept(t, j))], 0.0
                )  # fmt: skip

    def _memory(self, t: int) -> None:
        terms: list[Term] = [
            (self.keep[t, i], self.bytes[i]) for i in range(self.last(t) + 1) if (t, i) in self.keep
        ]  # fmt: skip
        before: int | None = None
        for k in range(self.last(t) + 1):
            now = self.variable(0.0, 0.0, self.limit, False)
            terms.append((self.run[t, k], self.bytes[k]))
            constant = self.dag.constant_bytes / self.scale if before is None else 0.0
            self.rows.equal([(now, -1.0), *terms, *([(before, 1.0)] if before is not None else [])], -constant)
            if self.transient[k]:
                peak = [(now, 1.0), (self.run[t, k], self.transient[k])]
                if self.dag.has_by_product(k):
                    peak.append((self.run[t, k + 1], -self.transient[k]))
                self.rows.at_most(peak, self.limit)
            terms = [(self._released(t, i, k), -self.bytes[i]) for i in {k, *self.nodes[k].reads} if self.bytes[i]]
            before = now

    def _released(self, t: int, i: int, k: int) -> int:
        """The variable F[t, i, k]."""
        freed = self.variable(0.0, 0.0, 1.0, False)
        self.rows.at_most([(freed, 1.0), (self.run[t, k], -1.0)], 0.0)
        hazards = [self.keep[t + 1, i]] if (t + 1, i) in self.keep else []
        hazards += [self.run[t, j] for j in self.readers[i] if k < j <= self.last(t)]
        for hazard in hazards:
            self.rows.at_most([(freed, 1.0), (hazard, 1.0)], 1.0)
        return freed

    @property
    def cost(self) -> Array:
        return np.array(self.costs)

    @property
    def integrality(self) -> Array:
        return np.array(self.integers)

    @property
    def low(self) -> Array:
        return np.array(self.lows)

    @property
    def high(self) -> Array:
        return np.array(self.highs)

    def constraints(self, optimize: ModuleType) -> Any:
        rows = self.rows
        matrix = _scipy("sparse").csr_array(
            (rows.values, (rows.row, rows.column)), shape=(len(rows.lower), len(self.costs))
        )  # fmt: skip
        return optimize.LinearConstraint(matrix, rows.lower, rows.upper)

    def schedule(self, x: Array) -> tuple[DagStage, ...]:
        return tuple(
            DagStage(
                runs=tuple(i for i in range(self.last(t) + 1) if x[self.run[t, i]] > 0.5),
                kept=frozenset(i for i in range(self.last(t) + 1) if (t, i) in self.keep and x[self.keep[t, i]] > 0.5),
            )
            for t in range(len(self.stages))
        )


def _unit(dag: Dag, limit_bytes: float) -> float:
    """The unit of the program: rounded fractions next to a tight limit have made HiGHS cut off optima."""
    sizes = [dag.constant_bytes, *(v for node in dag.nodes for v in (node.result_bytes, node.transient_bytes))]
    common = common_divisor(sizes)
    return common if common and limit_bytes <= 1e6 * common else max(limit_bytes, 1.0) / 1000


def _minus(terms: list[Term]) -> list[Term]:
    return [(column, -value) for column, value in terms]


@dataclass(slots=True)
class _Rows:
    """Sparse rows with their bounds."""

    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)

    def at_most(self, terms: list[Term], bound: float) -> None:
        self._add(terms, -math.inf, bound)

    def equal(self, terms: list[Term], bound: float) -> None:
        self._add(terms, bound, bound)

    def _add(self, terms: list[Term], lower: float, upper: float) -> None:
        self.row += [len(self.lower)] * len(terms)
        self.column += [column for column, _ in terms]
        self.values += [value for _, value in terms]
        self.lower.append(lower)
        self.upper.append(upper)
