"""Searches that others use, on the same problem and under the same cost as the exact solver, and how they are run.

Each is a function of a :class:`Meter`, which counts evaluations and CPU seconds, keeps the best choice that is legal
and fits, and ends the search when the budget is spent. A search may walk through choices that are illegal or too large:
for it they cost :attr:`Meter.illegal_s` for each illegal entry, and as much for each share of the limit by which memory
exceeds it at a moment. What is reported is legal, fits, and costs what :func:`~steptime.sharding.problem.total_s` says.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

import numpy as np

from steptime.num import Array
from steptime.registry import Registry
from steptime.sharding.problem import Edge, Node, Problem, feasible, memories_bytes, options_s, total_s, totals_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a search may spend; the first that is used up ends it."""

    cpu_s: float = 10.0
    evaluations: float = math.inf
    """Choices whose cost is computed, whole or as a change of one node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The best so far, when it was found."""

    cpu_s: float
    evaluations: int
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a search found, and how its best fell with time."""

    method: str
    choice: tuple[int, ...] | None
    """The best that is legal and fits; None: it found none."""
    total_s: float
    points: tuple[Point, ...]
    evaluations: int
    cpu_s: float
    stop: Literal["finished", "budget", "interrupted"]


class Spent(Exception):
    """The budget is used up."""


class Meter:
    """What a search evaluates with: costs without infinities, the budget, the best so far."""

    def __init__(self, problem: Problem, budget: Budget) -> None:
        self.problem, self.budget = problem, budget
        costs = [*(node.cost_s for node in problem.nodes), *(edge.cost_s for edge in problem.edges)]
        self.illegal_s = 2 * sum(map(_largest, costs)) or 1.0
        self.soft = replace(
            problem,
            nodes=tuple(replace(node, cost_s=self._finite(node)) for node in problem.nodes),
            edges=tuple(replace(edge, cost_s=self._finite(edge)) for edge in problem.edges),
        )
        self.started, self.evaluations = time.process_time(), 0
        self.best: Array | None = None
        self.total_s = math.inf
        self.points: list[Point] = []

    def _finite(self, part: Node | Edge) -> Array:
        return np.where(np.isfinite(part.cost_s), part.cost_s, self.illegal_s)

    @property
    def cpu_s(self) -> float:
        """CPU seconds since the start."""
        return time.process_time() - self.started

    @property
    def left_s(self) -> float:
        """CPU seconds of the budget that are left."""
        return self.budget.cpu_s - self.cpu_s

    def spend(self, evaluations: int) -> None:
        """Counts evaluations; ends the search if the budget is used up."""
        self.evaluations += evaluations
        if self.evaluations >= self.budget.evaluations or self.left_s <= 0:
            raise Spent

    def excess_s(self, memory: Array) -> Array:
        """Penalty of the memory at all moments, which are the last axis."""
        if not self.problem.limited:
            return np.zeros(memory.shape[:-1])
        limit = max(self.problem.limit_bytes, 1.0)
        over: Array = np.maximum(memory / limit - 1 - 1e-12, 0.0).sum(axis=-1)
        return over * self.illegal_s

    def scores_s(self, choices: Array) -> Array:
        """Seconds with penalties of choices, one a row; the best of them is offered."""
        out: Array = totals_s(self.soft, choices) + self.excess_s(memories_bytes(self.soft, choices))
        self.offer(choices[int(out.argmin())])
        self.spend(len(choices))
        return out

    def offer(self, choice: Array | Sequence[int]) -> None:
        """Keeps a choice if it is legal, fits, and is the best so far."""
        total = total_s(self.problem, choice)
        if total < self.total_s and feasible(self.problem, choice):
            self.best, self.total_s = np.array(choice, int), total
            self.points.append(Point(cpu_s=self.cpu_s, evaluations=self.evaluations, total_s=total))


def _largest(values: Array) -> float:
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


class Walk:
    """A choice that changes node by node, with its memory kept up to date."""

    def __init__(self, meter: Meter, choice: Array) -> None:
        self.meter, self.choice = meter, np.array(choice, int)
        self.memory = memories_bytes(meter.soft, self.choice[None, :])[0]

    def deltas_s(self, node: int) -> Array:
        """Seconds with penalties by which each option of a node changes the choice."""
        row, now = options_s(self.meter.soft, self.choice, node), self.choice[node]
        moments, taken = self.meter.soft.held[node]
        if len(moments) and self.meter.problem.limited:
            rest = self.memory[moments] - taken[now]
            row = row + self.meter.excess_s(rest + taken)
        out: Array = row - row[now]
        return out

    def take(self, node: int, option: int) -> None:
        """Changes one node."""
        moments, taken = self.meter.soft.held[node]
        self.memory[moments] += taken[option] - taken[self.choice[node]]
        self.choice[node] = option


Method: TypeAlias = Callable[[Meter, np.random.Generator], None]

BASELINES: Final = Registry[Method]("baseline", "steptime.sharding_baselines")
for _name, _place in {
    "random": "local_search:at_random",
    "greedy": "local_search:greedily",
    "local": "local_search:descend",
    "mcmc": "local_search:mcmc",
    "rl": "learned:policy_gradient",
    "bayesian": "learned:bayesian",
    "learned": "learned:learned_cost",
    "hierarchical": "structured:axis_by_axis",
    "tree": "structured:trees",
    "exact": "structured:exact",
}.items():
    BASELINES.later(_name, f"steptime.sharding.{_place}")


def search(method: str, problem: Problem, budget: Budget | None = None, seed: int = 0) -> Trace:
    """Runs a baseline by its name; Ctrl-C ends it with what it has.

    Raises:
        UnknownNameError: the name is unknown.

    >>> nodes = tuple(Node(name=name, cost_s=np.array([2.0, 1.0])) for name in "ab")
    >>> trace = search("greedy", Problem(nodes=nodes))
    >>> trace.choice, trace.total_s, trace.stop
    ((1, 1), 2.0, 'finished')
    """
    run, meter = BASELINES[method], Meter(problem, budget or Budget())
    stop: Literal["finished", "budget", "interrupted"] = "finished"
    try:
        if problem.nodes:
            run(meter, np.random.default_rng(seed))
        else:
            meter.offer(())
    except Spent:
        stop = "budget"
    except KeyboardInterrupt:
        stop = "interrupted"
    return Trace(
        method=method,
        choice=None if meter.best is None else tuple(map(int, meter.best)),
        total_s=meter.total_s,
        points=tuple(meter.points),
        evaluations=meter.evaluations,
        cpu_s=meter.cpu_s,
        stop=stop,
    )
