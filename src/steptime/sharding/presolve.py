"""Exact reductions of a sharding problem, and the recovery of a choice of the large problem from the reduced one.

* An option is **dropped** where it is illegal with every option of a neighbour, does not fit with the least of the
  rest, or is dominated: another option of the node is never dearer, whatever the neighbours take, and takes no more
  memory at any moment (dead-end elimination; Desmet et al., Nature 356, 1992).
* An edge whose matrix is a sum of a row and a column is moved into its two nodes.
* A moment is dropped where memory cannot reach the limit, or where another moment never has less.
* A node without memory and with at most two neighbours is **eliminated**: its cheapest option for each pair of options
  of the neighbours becomes a matrix between them (min-plus product; Bertelè and Brioschi, *Nonserial Dynamic
  Programming*, 1972). Chains, trees and series-parallel graphs vanish altogether.

The least total does not change, up to rounding of sums. A choice of the small problem that fits, fits in the large one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from steptime.num import Array
from steptime.sharding.problem import ROUNDING, Edge, Moment, Node, Problem

SEPARABLE: Final = 1e-13
"""Largest deviation from a sum of a row and a column, as a share of the largest entry, of a separable matrix."""
ROUNDS: Final = 20
"""Largest number of passes over all reductions; in practice three to five suffice."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """Rule by which the option of an eliminated node follows from options of others."""

    node: int
    by: tuple[int, ...]
    """The other nodes, at most two."""
    table: Array
    """Option of the node, [options of the others]; -1: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduction:
    """A smaller problem with the same least total."""

    problem: Problem
    constant_s: float
    """Seconds that the totals of the large problem have in addition."""
    alive: tuple[int, ...]
    """Place in the large problem of each node of the small one."""
    kept: tuple[Array, ...]
    """For each node of the small problem, its options as numbered in the large one."""
    steps: tuple[Step, ...]
    """Eliminated nodes, in the order of elimination."""

    def recover(self, choice: Sequence[int] | Array) -> Array:
        """The choice of the large problem for a choice of the small one."""
        out = np.full(len(self.alive) + len(self.steps), -1)
        for node, options, option in zip(self.alive, self.kept, choice, strict=True):
            out[node] = options[option]
        for step in reversed(self.steps):
            out[step.node] = step.table[tuple(out[other] for other in step.by)]
        return out

    def reduced(self, choice: Sequence[int] | Array) -> list[int] | None:
        """The choice of the small problem for one of the large; None: it has a dropped option."""
        places = [np.flatnonzero(kept == choice[node]) for node, kept in zip(self.alive, self.kept, strict=True)]
        return [int(place[0]) for place in places] if all(map(len, places)) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """The reason why no choice is legal and fits."""

    because: str


class _Contradiction(Exception):
    """A conflict that was found during reduction."""


class _Work:
    """The state of a problem during reduction."""

    def __init__(self, problem: Problem) -> None:
        self.source = problem
        count = len(problem.nodes)
        self.cost: list[Array] = [node.cost_s.astype(float) for node in problem.nodes]
        self.kept = [np.arange(len(node.cost_s)) for node in problem.nodes]
        self.near: list[dict[int, Array]] = [{} for _ in range(count)]
        self.fixed = {t: moment.fixed_bytes for t, moment in enumerate(problem.moments)} if problem.limited else {}
        self.held: list[dict[int, Array]] = [{} for _ in range(count)]
        if problem.limited:
            for node, (moments, taken) in enumerate(problem.held):
                self.held[node] = {int(t): taken[:, at] for at, t in enumerate(moments)}
        self.limit = problem.limit_bytes * (1 + ROUNDING)
        self.constant = 0.0
        self.alive = dict.fromkeys(range(count))
        self.steps: list[Step] = []
        self.undominated: dict[int, tuple[Array, ...]] = {}
        """Node -> costs, matrices and bytes at the last check, in which no option was dominated."""
        for edge in problem.edges:
            self.join(edge.u, edge.v, edge.cost_s)

    def name(self, node: int) -> str:
        return self.source.nodes[node].name

    def join(self, u: int, v: int, matrix: Array) -> None:
        """Add a matrix between two nodes, or move it into them if it is a sum of a row and a column."""
        if v in self.near[u]:
            matrix = matrix + self.near[u][v]
        if np.isfinite(matrix).all():
            column, row = matrix[:, 0], matrix[0] - matrix[0, 0]
            rest = np.abs(matrix - column[:, None] - row).max()
            if rest <= SEPARABLE * np.abs(matrix).max():
                self.cost[u], self.cost[v] = self.cost[u] + column, self.cost[v] + row
                self.part(u, v)
                return
        self.near[u][v], self.near[v][u] = matrix, matrix.T

    def part(self, u: int, v: int) -> None:
        self.near[u].pop(v, None)
        self.near[v].pop(u, None)

    def restrict(self, node: int, keep: Array) -> bool:
        """Restrict a node to the options of a mask; returns True if that changed it."""
        if keep.all():
            return False
        if not keep.any():
            others = ", ".join(self.name(other) for other in self.near[node])
            raise _Contradiction(f"{self.name(node)} has no option that goes with {others or 'the limit of memory'}")
        self.cost[node], self.kept[node] = self.cost[node][keep], self.kept[node][keep]
        self.held[node] = {t: taken[keep] for t, taken in self.held[node].items()}
        for other, matrix in list(self.near[node].items()):
            self.part(node, other)
            self.join(node, other, matrix[keep])
        return True

    def forget(self, node: int, by: tuple[int, ...], table: Array) -> None:
        """Eliminate a node, whose option follows from a table in the current numbering."""
        sizes = tuple(len(self.source.nodes[other].cost_s) for other in by)
        full = np.full(sizes, -1)
        full[np.ix_(*(self.kept[other] for other in by))] = np.where(table < 0, -1, self.kept[node][table])
        self.steps.append(Step(node=node, by=by, table=full))
        for other in list(self.near[node]):
            self.part(node, other)
        self.held[node] = {}
        del self.alive[node]

    def spend(self, node: int, seconds: float) -> None:
        """Add the seconds of an eliminated node to the constant."""
        if not math.isfinite(seconds):
            raise _Contradiction(f"{self.name(node)} has no legal option with what its neighbours can take")
        self.constant += seconds

    def done(self) -> Reduction:
        alive = tuple(self.alive)
        place = {node: at for at, node in enumerate(alive)}
        nodes = []
        for node in alive:
            tags = self.source.nodes[node].tags
            tags = None if tags is None else tags[self.kept[node]]
            if not np.isfinite(self.cost[node]).any():
                raise _Contradiction(f"{self.name(node)} has no legal option with what follows it")
            nodes.append(Node(name=self.name(node), cost_s=self.cost[node], tags=tags))
        edges = tuple(
            Edge(u=place[u], v=place[v], cost_s=matrix) for u in alive for v, matrix in self.near[u].items() if u < v
        )
        live: dict[int, list[tuple[int, Array]]] = {t: [] for t in self.fixed}
        for node in alive:
            for t, taken in self.held[node].items():
                live[t].append((place[node], taken))
        moments = tuple(
            Moment(name=self.source.moments[t].name, entries=tuple(entries), fixed_bytes=self.fixed[t])
            for t, entries in live.items()
        )
        return Reduction(
            problem=Problem(nodes=tuple(nodes), edges=edges, moments=moments, limit_bytes=self.source.limit_bytes),
            constant_s=self.constant,
            alive=alive,
            kept=tuple(self.kept[node] for node in alive),
            steps=tuple(self.steps),
        )


def presolve(problem: Problem) -> Reduction | Conflict:
    """Reduce a problem as far as the exact reductions go.

    >>> chain = Problem(
    ...     nodes=tuple(Node(name=name, cost_s=np.array([1.0, 2.0])) for name in "abc"),
    ...     edges=tuple(Edge(u=u, v=u + 1, cost_s=np.array([[0.0, 9.0], [np.inf, 0.0]])) for u in (0, 1)),
    ... )
    >>> small = presolve(chain)
    >>> small.problem.nodes, small.constant_s, small.recover([])
    ((), 3.0, array([0, 0, 0]))
    """
    work = _Work(problem)
    try:
        for _ in range(ROUNDS):
            # All passes run (a list, not a generator), because one may enable the next.
            changed = [reduce(work) for reduce in (_legal, _moments, _small, _dominated)]
            if not any(changed):
                break
        return work.done()
    except _Contradiction as found:
        return Conflict(because=str(found))


def _legal(work: _Work) -> bool:
    """Drop options that are illegal alone or with every option of a neighbour."""
    changed, queue = False, list(work.alive)
    while queue:
        node = queue.pop()
        keep = np.isfinite(work.cost[node])
        for matrix in work.near[node].values():
            keep &= np.isfinite(matrix).any(axis=1)
        if work.restrict(node, keep):
            changed = True
            queue += work.near[node]
    return changed


def _small(work: _Work) -> bool:
    """Eliminate nodes with one option, and nodes without memory that have at most two neighbours."""
    changed, queue = False, sorted(work.alive, key=lambda node: (-len(work.near[node]), -node))
    while queue:
        node = queue.pop()
        if node not in work.alive:
            continue
        others = tuple(work.near[node])
        if len(work.cost[node]) == 1:
            _fix(work, node)
        elif len(others) <= 2 and not work.held[node]:
            _eliminate(work, node, others)
        else:
            continue
        changed = True
        queue += others
    return changed


def _fix(work: _Work, node: int) -> None:
    work.spend(node, float(work.cost[node][0]))
    for t, taken in work.held[node].items():
        work.fixed[t] += float(taken[0])
    for other, matrix in work.near[node].items():
        work.cost[other] = work.cost[other] + matrix[0]
    work.forget(node, (), np.array(0))


def _eliminate(work: _Work, node: int, others: tuple[int, ...]) -> None:
    sums = work.cost[node].reshape(-1, *(1 for _ in others))
    for axis, other in enumerate(others):
        matrix = work.near[node][other]
        sums = sums + matrix.reshape(len(matrix), *(-1 if at == axis else 1 for at in range(len(others))))
    best, table = sums.min(axis=0), sums.argmin(axis=0)
    work.forget(node, others, np.where(np.isfinite(best), table, -1))
    if not others:
        work.spend(node, float(best))
    elif len(others) == 1:
        work.cost[others[0]] = work.cost[others[0]] + best
    else:
        work.join(others[0], others[1], best)


def _moments(work: _Work) -> bool:
    """Drop moments that do not bind and options that cannot fit; move constant memory into the fixed bytes."""
    changed = False
    for node in work.alive:
        for t, taken in list(work.held[node].items()):
            least = float(taken.min())
            work.fixed[t] += least
            work.held[node][t] = taken - least
            if not work.held[node][t].any():
                del work.held[node][t]
    for node in work.alive:
        keep = np.ones(len(work.cost[node]), bool)
        for t, taken in work.held[node].items():
            keep &= work.fixed[t] + taken <= work.limit
        changed |= work.restrict(node, keep)
    for t, least in work.fixed.items():
        if least > work.limit:
            name = work.source.moments[t].name
            raise _Contradiction(f"{name} needs {least:,.0f} bytes at least; the limit is {work.limit:,.0f}")
    return _drop_moments(work) or changed


def _drop_moments(work: _Work) -> bool:
    names = list(work.fixed)
    nodes = [node for node in work.alive if work.held[node]]
    if not names:
        return False
    starts = np.concatenate([[0], np.cumsum([len(work.cost[node]) for node in nodes], dtype=int)])
    dense = np.zeros((len(names), int(starts[-1])))
    row = {t: at for at, t in enumerate(names)}
    for node, start in zip(nodes, starts, strict=False):
        for t, taken in work.held[node].items():
            dense[row[t], start : start + len(taken)] = taken
    fixed = np.array([work.fixed[t] for t in names])

    def most(rows: Array) -> Array:
        return np.maximum.reduceat(rows, starts[:-1], axis=1).sum(axis=1) if nodes else np.zeros(len(rows))

    stay = fixed + most(dense) > work.limit
    for at in np.flatnonzero(stay):
        covered = fixed[at] + most(dense[at] - dense) <= fixed
        covered[at] = False
        stay[at] = not (covered & stay).any()
    for t in itertools.compress(names, ~stay):
        del work.fixed[t]
        for node in nodes:
            work.held[node].pop(t, None)
    return not stay.all()


def _dominated(work: _Work) -> bool:
    """Drop options that another option of the same node dominates."""
    changed = False
    for node in list(work.alive):
        state = (work.cost[node], *work.near[node].values(), *work.held[node].values())
        before = work.undominated.get(node, ())
        if len(state) == len(before) and all(now is then for now, then in zip(state, before, strict=True)):
            continue  # unchanged since the last check
        worse = _excess(work, node) <= 0
        np.fill_diagonal(worse, False)
        keep = np.ones(len(worse), bool)
        for option in range(len(worse) - 1, -1, -1):
            keep[option] = not (worse[option] & keep).any()
        changed |= work.restrict(node, keep)
        work.undominated[node] = state if keep.all() else ()
    return changed


def _excess(work: _Work, node: int) -> Array:
    """Largest excess of option j over option i in seconds, [i, j]; infinite if it takes more memory."""
    out = _most(work.cost[node][:, None])
    for taken in work.held[node].values():
        out[taken[None, :] > taken[:, None]] = np.inf
    for matrix in work.near[node].values():
        most = _most(matrix)
        never = np.isposinf(most) | np.isposinf(out)
        out = np.where(never, np.inf, np.where(never, 0.0, out) + np.where(never, 0.0, most))
    return out


def _most(matrix: Array) -> Array:
    """Largest excess of row j over row i, [i, j]; columns that are infinite in row i do not count."""
    with np.errstate(invalid="ignore"):
        more = matrix[None, :, :] - matrix[:, None, :]
    more[np.isnan(more)] = -np.inf
    most: Array = more.max(axis=2)
    return most
