"""Searches that change a choice node by node, with the problem and the cost of the exact solver.

A search is a function of a :class:`Meter`, which counts evaluations and CPU seconds, keeps the best choice that is
legal and fits, and ends the search when the budget is spent. A search may pass through choices that are illegal or too
large: each illegal entry costs :attr:`Meter.illegal_s`, and so does an excess of memory by the whole limit at a moment
(less in proportion). The reported choice is legal, fits, and costs :func:`~steptime.sharding.problem.total_s`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

import numpy as np

from steptime.num import Array
from steptime.sharding.problem import Edge, Node, Problem, feasible, memories_bytes, options_s, total_s, totals_s

SHAKEN: Final = 0.05
"""Share of nodes that a restart of the descent draws again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of a search; the first one that is reached ends it."""

    cpu_s: float = 10.0
    evaluations: float = math.inf
    """Number of choices whose cost is computed, in full or as a change of one node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A new best total, with the time and the evaluations until it was found."""

    cpu_s: float
    evaluations: int
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The result of a search, and its best totals over time."""

    method: str
    choice: tuple[int, ...] | None
    """The best choice that is legal and fits; None: none was found."""
    total_s: float
    points: tuple[Point, ...]
    evaluations: int
    cpu_s: float
    stop: Literal["finished", "budget", "interrupted"]


class Spent(Exception):
    """The budget is used up."""


class Meter:
    """Evaluation of choices for a search: finite costs, the budget, and the best choice so far."""

    def __init__(self, problem: Problem, budget: Budget) -> None:
        self.problem, self.budget = problem, budget
        costs = [*(node.cost_s for node in problem.nodes), *(edge.cost_s for edge in problem.edges)]
        largest = (float(np.abs(each[np.isfinite(each)]).max(initial=0.0)) for each in costs)
        self.illegal_s = 2 * sum(largest) or 1.0
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
        """Count evaluations, and end the search if the budget is used up."""
        self.evaluations += evaluations
        if self.evaluations >= self.budget.evaluations or self.left_s <= 0:
            raise Spent

    def excess_s(self, memory: Array) -> Array:
        """Penalty in seconds of memory above the limit, summed over moments (the last axis)."""
        if not self.problem.limited:
            return np.zeros(memory.shape[:-1])
        limit = max(self.problem.limit_bytes, 1.0)
        over: Array = np.maximum(memory / limit - 1 - 1e-12, 0.0).sum(axis=-1)
        return over * self.illegal_s

    def scores_s(self, choices: Array) -> Array:
        """Seconds with penalties of choices, one per row; offers the best of them."""
        out: Array = totals_s(self.soft, choices) + self.excess_s(memories_bytes(self.soft, choices))
        self.offer(choices[int(out.argmin())])
        self.spend(len(choices))
        return out

    def offer(self, choice: Array | Sequence[int]) -> None:
        """Keep a choice if it is legal, fits, and is the best so far."""
        total = total_s(self.problem, choice)
        if total < self.total_s and feasible(self.problem, choice):
            self.best, self.total_s = np.array(choice, int), total
            self.points.append(Point(cpu_s=self.cpu_s, evaluations=self.evaluations, total_s=total))


class Walk:
    """A choice that changes node by node, with its memory kept up to date."""

    def __init__(self, meter: Meter, choice: Array) -> None:
        self.meter, self.choice = meter, np.array(choice, int)
        self.memory = memories_bytes(meter.soft, self.choice[None, :])[0]

    def deltas_s(self, node: int) -> Array:
        """Change of the seconds with penalties for each option of a node."""
        row, now = options_s(self.meter.soft, self.choice, node), self.choice[node]
        moments, taken = self.meter.soft.held[node]
        if len(moments) and self.meter.problem.limited:
            rest = self.memory[moments] - taken[now]
            row = row + self.meter.excess_s(rest + taken)
        out: Array = row - row[now]
        return out

    def take(self, node: int, option: int) -> None:
        """Change the option of one node."""
        moments, taken = self.meter.soft.held[node]
        self.memory[moments] += taken[option] - taken[self.choice[node]]
        self.choice[node] = option


Method: TypeAlias = Callable[[Meter, np.random.Generator], None]


def searched(run: Method, problem: Problem, budget: Budget | None = None, seed: int = 0, name: str = "") -> Trace:
    """Run a search; Ctrl-C ends it with the best choice so far."""
    meter = Meter(problem, budget or Budget())
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
        method=name,
        choice=None if meter.best is None else tuple(map(int, meter.best)),
        total_s=meter.total_s,
        points=tuple(meter.points),
        evaluations=meter.evaluations,
        cpu_s=meter.cpu_s,
        stop=stop,
    )


def random_choice(meter: Meter, rng: np.random.Generator, count: int = 1) -> Array:
    """Random choices, one per row, with all options equally likely."""
    return rng.integers(0, meter.problem.sizes, (count, len(meter.problem.nodes)))


def greedy(meter: Meter) -> Array:
    """The greedy choice: in the order of the problem, each node takes its cheapest option given the earlier nodes.

    Later nodes count with the least memory of their options.
    """
    soft = meter.soft
    choice = np.zeros(len(soft.nodes), int)
    memory = soft.tables.fixed_bytes.copy()
    for moments, taken in soft.held:
        memory[moments] += taken.min(axis=0)
    for node, (moments, taken) in enumerate(soft.held):
        row = soft.nodes[node].cost_s
        for other, matrix in soft.incident[node]:
            if other < node:
                row = row + matrix[:, choice[other]]
        rest = memory[moments] - taken.min(axis=0)
        if len(moments):
            row = row + meter.excess_s(rest + taken)
        choice[node] = int(row.argmin())
        memory[moments] = rest + taken[choice[node]]
        meter.evaluations += len(row)
    meter.offer(choice)
    return choice


def settle(walk: Walk, rng: np.random.Generator) -> None:
    """Give every node its best option, in random order, until no change of one node helps."""
    count = len(walk.choice)
    waiting = dict.fromkeys(rng.permutation(count).tolist())
    while waiting:
        node = next(iter(waiting))
        del waiting[node]
        change = walk.deltas_s(node)
        option = int(change.argmin())
        if change[option] < -1e-15 * walk.meter.illegal_s:
            walk.take(node, option)
            waiting.update(dict.fromkeys(other for other, _ in walk.meter.soft.incident[node]))
            walk.meter.offer(walk.choice)
        walk.meter.spend(len(change))


def descend(meter: Meter, rng: np.random.Generator) -> None:
    """Coordinate descent from the greedy choice, then from random changes of the best until the budget is spent."""
    walk = Walk(meter, greedy(meter))
    best, least = walk.choice.copy(), math.inf
    while True:
        settle(walk, rng)
        score = float(meter.scores_s(walk.choice[None, :])[0])
        if score <= least:
            best, least = walk.choice.copy(), score
        shaken = rng.random(len(best)) < max(SHAKEN, 1 / len(best))
        walk = Walk(meter, np.where(shaken, random_choice(meter, rng)[0], best))


def descended(problem: Problem, starts: Sequence[Sequence[int]], evaluations: float) -> Array | None:
    """The best choice that coordinate descents meet, which start from the given choices and the greedy one.

    None: no choice that is legal and fits was found.
    """
    meter = Meter(problem, Budget(cpu_s=math.inf, evaluations=evaluations))
    try:
        for start in (*map(np.array, starts), greedy(meter)):
            meter.offer(start)
            settle(Walk(meter, start), np.random.default_rng(0))
    except Spent:
        pass
    return meter.best
