r"""The best shardings of a captured step on the devices of a cluster, with a lower bound of the step time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import inf
from typing import Any, Final

import numpy as np

from steptime.captured.graph.liveness import Liveness
from steptime.captured.ops.placement import Sharding
from steptime.errors import UserError
from steptime.num import Array, Num, maximum
from steptime.sharding.build import Built, exchange_s
from steptime.sharding.flow import Link
from steptime.sharding.ilp import GAP, Solution, solve
from steptime.sharding.mesh import Mesh
from steptime.sharding.options import Strategy
from steptime.sharding.paths import Leg, legs_of
from steptime.sharding.problem import ROUNDING, Problem
from steptime.sharding.reshard import TORCH

WEIGHTS: Final = 6
"""Largest number of relaxations of the overlap that are solved."""
ENOUGH: Final = 1e-3
"""Gap below which no further relaxation is solved."""
LEAST_S: Final = 0.2
"""Least time limit of a solver, so that it finds a choice that fits."""
PROVED: Final = "proved to be the best"
"""Reason of a stop without a remaining gap."""
ROUNDS: Final = 4
"""Largest number of rounds in which the points in time are added at which a solution needs too much memory."""
Solver = Callable[..., Solution]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A collective of a plan, with its tensor, axes, size and time."""

    source: str
    """Item that made the tensor."""
    target: str
    """Item that reads it; equal to ``source`` for communication inside an operator."""
    collective: str
    """Name of the collective in PyTorch."""
    axes: tuple[str, ...]
    size_bytes: float
    """Bytes of one call: the result of a gather, else the input."""
    seconds: float
    """Seconds of one call."""
    count: int
    """Number of calls in a step."""


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """Shardings of a step, their time, and a bound."""

    built: Built
    choice: Array
    """Option of each item."""
    overlaps: float
    """Share of the traffic of weights and their gradients that may run while the devices compute."""
    bound_s: float
    """Lower bound for all shardings on this mesh, by the same costs; 0: nothing was searched."""
    stop: str
    """Why the search stopped."""
    cpu_s: float
    solutions: tuple[Solution, ...]

    @cached_property
    def parts_s(self) -> tuple[float, float, float]:
        """Computation, traffic of weights and their gradients, all other traffic with the optimiser (s)."""
        return self.built.parts_s(self.choice)

    @property
    def step_s(self) -> float:
        """Seconds of the devices in a step: computation and traffic."""
        return float(step_of(self.parts_s, self.overlaps))

    @property
    def bracket_s(self) -> tuple[float, float]:
        """Seconds if all traffic overlaps with computation, and if none does."""
        computing, data, others = self.parts_s
        return max(computing, data + others), computing + data + others

    @property
    def gap(self) -> float:
        """Share of the step by which it may exceed the optimum."""
        return max(self.step_s - self.bound_s, 0.0) / self.step_s if self.step_s else 0.0

    @cached_property
    def memory_bytes(self) -> Array:
        """Bytes of one device while each call runs; entry 0: before the first call."""
        return memory_of(self.built, self.choice)

    def sharding_of(self, item: int, output: int = 0) -> Sharding:
        """Sharding of an output of an item."""
        return self.built.ways[item][int(self.choice[item])].outputs[output]

    def legs(self, link: Link) -> tuple[Leg, ...]:
        """Resharding and views of a value on the way to its reader."""
        source, target = self.built.flow.items[link.source], self.built.flow.items[link.target]
        way = self.built.ways[link.target][self.choice[link.target]]
        wanted = (way.outputs if target.kind == "source" else way.inputs)[link.input]
        made = self.sharding_of(link.source, link.output)
        return legs_of(source.node.outputs[link.output], link.looks, made, wanted, self.built.mesh)

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """All communication in a step: by link, then inside operators."""
        built, mesh, found = self.built, self.built.mesh, list[Transfer]()
        for link in built.flow.links:
            source, target = built.flow.items[link.source], built.flow.items[link.target]
            for leg in self.legs(link):
                found += [
                    Transfer(
                        source=source.name,
                        target=target.name,
                        collective=step.collective,
                        axes=step.axes,
                        size_bytes=step.size_bytes,
                        seconds=step.seconds,
                        count=link.count,
                    )
                    for step in leg.route.steps
                    if step.collective
                ]
        for item, ways, option in zip(built.flow.items, built.ways, self.choice, strict=True):
            strategy = ways[option].strategy
            if strategy is not None:
                found += [
                    replace(each, source=item.name, target=item.name, count=each.count * item.count)
                    for each in inside(item.node.op, strategy, mesh)
                ]
        return tuple(found)

    @property
    def parameters(self) -> dict[str, Sharding]:
        """Sharding of each parameter."""
        return {name: self.sharding_of(item) for name, item in self.built.flow.of_parameter.items()}


def inside(op: str, strategy: Strategy, mesh: Mesh) -> Iterator[Transfer]:
    """Communication inside an operator.

    Axes with the same collective and size share one call. A softmax reduces the maximum of a row, then its sum; a halo
    goes to both neighbours.
    """
    parts = 2 if op in ("_softmax", "_log_softmax") else 1
    groups: dict[tuple[str, float], list[int]] = {}
    for axis, exchange in enumerate(strategy.exchanges):
        if exchange is not None:
            groups.setdefault((exchange.collective, exchange.size_bytes), []).append(axis)
    for (collective, size_bytes), axes in groups.items():
        exchanges = tuple(each if axis in axes else None for axis, each in enumerate(strategy.exchanges))
        yield Transfer(
            source="",
            target="",
            collective=TORCH.get(collective, collective),
            axes=tuple(mesh.names[n] for n in axes),
            size_bytes=size_bytes / parts,
            seconds=exchange_s(replace(strategy, exchanges=exchanges), mesh) / parts,
            count=parts,
        )


def step_of(parts_s: tuple[Num, Num, Num], overlaps: float) -> Any:
    r"""Time of a step from its parts, $T = r + (1 - s) (c + d) + s \max(c, d)$.

    $c$ are the seconds of computation, $d$ those of weights and their gradients, $r$ all others, and $s$ = `overlaps`
    is the share of $d$ that $c$ may overlap.

    >>> step_of((3.0, 2.0, 1.0), 1.0), step_of((3.0, 2.0, 1.0), 0.0), step_of((3.0, 2.0, 1.0), 0.5)
    (4.0, 6.0, 5.0)
    """
    computing, data, others = parts_s
    return others + overlaps * maximum(computing, data) + (1 - overlaps) * (computing + data)


def _shares(built: Built, choice: Array) -> Callable[[tuple[int, int]], float]:
    """A cached function from item and tensor to the share of it that one device has."""

    @cache
    def share(place: tuple[int, int]) -> float:
        return float(built.shares(*place)[int(choice[place[0]])])

    return share


def local_bytes(built: Built, choice: Array) -> Array:
    """Bytes of each storage of the step on one device."""
    owners, share = built.flow.owners, _shares(built, choice)
    storages = enumerate(built.flow.program.storages)
    return np.array([each.size_bytes * (share(owners[n]) if n in owners else 1.0) for n, each in storages])


def memory_of(built: Built, choice: Array) -> Array:
    """Bytes of one device while each call runs, by liveness of the recorded storages; entry 0: before the first."""
    flow, share = built.flow, _shares(built, choice)
    local = zip(flow.program.storages, local_bytes(built, choice).tolist(), strict=True)
    storages = [replace(storage, size_bytes=round(size)) for storage, size in local]
    calls = list(flow.program.calls)
    for number, item in flow.of_call.items():
        if calls[number].scratch_bytes:
            scratch_bytes = calls[number].scratch_bytes * share((item, flow.items[item].widest))
            calls[number] = replace(calls[number], scratch_bytes=round(scratch_bytes))
    in_use: Array = Liveness(replace(flow.program, storages=tuple(storages), calls=tuple(calls))).in_use_bytes
    return in_use


def planned(
    built: Built, *, overlaps: float = 1.0, gap: float = GAP, seconds: float = 60.0, solver: Solver = solve
) -> ShardingPlan:
    """The best shardings on a mesh.

    The relaxation of the overlap is solved for several weights between computation and traffic until the bound is near.
    If the solution exceeds the memory limit at other points in time, these are added and it is solved again.

    Args:
        built: the problem.
        overlaps: share of the traffic of weights and their gradients that may run while the devices compute.
        gap: share above the bound at which the solver may stop.
        seconds: time limit of the solver, all rounds together.
        solver: :func:`steptime.sharding.ilp.solve` or a function with its arguments.

    Raises:
        UserError: nothing fits in memory; the message gives the least need.
    """
    until, before_s = time.monotonic() + seconds, 0.0
    for _ in range(ROUNDS):
        found = _over_weights(built, overlaps, gap, until, solver)
        found = replace(found, cpu_s=before_s + found.cpu_s)
        before_s, over = found.cpu_s, _too_full(found)
        if not over:
            return found
        built = built.with_moments(over)
    return replace(found, stop=f"{found.stop}; memory is above the limit at other points in time than were limited")


def _too_full(found: ShardingPlan) -> list[int]:
    """The two calls with the most memory of a plan, if above the limit."""
    built = found.built
    if built.limit_bytes == inf:
        return []
    use = found.memory_bytes[1:]
    order = np.argsort(-use, kind="stable")[:2]
    return [int(call) for call in order if use[call] > built.limit_bytes * (1 + 1e-9)]


def _over_weights(built: Built, overlaps: float, gap: float, until: float, solver: Solver) -> ShardingPlan:
    """The best plan of relaxations for several weights; the bound is highest where computation equals traffic."""
    if not overlaps:
        return _plan(built, 0.0, [_solved(built, None, gap, until, solver)], 0.0, gap)
    lines: list[tuple[float, float]] = []
    solutions: list[Solution] = []
    problem, best_s, bound_s, weights, tried = built.problem(), inf, 0.0, [0.0], set[float]()
    while weights and len(solutions) < WEIGHTS:
        weight = weights.pop()
        tried.add(weight)
        solutions.append(_solved(built, weight, gap, until, solver, overlaps))
        bound_s = max(bound_s, solutions[-1].bound_s)
        computing, data, others = built.parts_s(np.asarray(solutions[-1].choice))
        lines.append((others + computing + (1 - overlaps) * data, overlaps * (data - computing)))
        best_s = min(best_s, step_of((computing, data, others), overlaps))
        if len(solutions) > 1:  # further solutions take longest where memory is tight
            after = descended(built, problem, solutions[-1].choice, overlaps)
            best_s = min(best_s, step_of(built.parts_s(after), overlaps))
        if best_s - bound_s <= max(ENOUGH, gap / 2) * best_s or time.monotonic() > until:
            break
        following = 0.5 if 0.5 not in tried else _highest(lines)
        if following == 1.0:  # without any weight on computation a memory limit is hardest to prove
            following = (1.0 + max(tried)) / 2
        weights = [] if following in tried else [following]
    return _plan(built, overlaps, solutions, bound_s, gap, late=time.monotonic() > until)


def descended(built: Built, problem: Problem, choice: Array | Sequence[int] | None, overlaps: float = 1.0) -> Array:
    """Coordinate descent on the step with overlap, until no change of a single item makes it faster.

    Args:
        built: times of the options.
        problem: any problem of ``built``, for memory.
        choice: the start, such as a solution of the relaxation.
        overlaps: as in :func:`planned`.
    """
    seconds, out = built.seconds, np.array(choice)
    near: list[tuple[list[tuple[int, Array]], list[tuple[int, Array]]]] = [([], []) for _ in out]
    for kind, pairs in enumerate((seconds.moved, seconds.data)):
        for (u, v), matrix in pairs.items():
            near[u][kind].append((v, matrix))
            near[v][kind].append((u, matrix.T))
    computing, data, others = built.parts_s(out)
    use = np.zeros(len(problem.moments))
    for each, entry in enumerate(problem.moments):
        use[each] = entry.fixed_bytes + sum(float(taken[out[item]]) for item, taken in entry.entries)
    changed = True
    while changed:
        changed = False
        for item in range(len(out)):
            c = seconds.operators[item]
            r, d = (sum((m[:, out[v]] for v, m in found), np.zeros(len(c))) for found in near[item])
            r, now, at = r + seconds.inside[item], int(out[item]), problem.held[item]
            parts = computing + c - c[now], data + d - d[now], others + r - r[now]
            steps = step_of(parts, overlaps)
            after = use[at[0]] + at[1] - at[1][now]
            steps[(after > built.limit_bytes * (1 + ROUNDING)).any(axis=1)] = inf
            best = int(np.argmin(steps))
            if steps[best] < steps[now] * (1 - ROUNDING):
                out[item], changed = best, True
                computing, data, others = (float(each[best]) for each in parts)
                use[at[0]] = after[best]
    return out


def _highest(lines: Sequence[tuple[float, float]]) -> float:
    """Weight at which the lower envelope of the lines (value at 0, slope) of all solutions is highest."""
    crossings = [0.0, 1.0]
    for n, (a, slope) in enumerate(lines):
        crossings += [(b - a) / (slope - other) for b, other in lines[:n] if abs(slope - other) > 1e-30]
    inside = [round(each, 6) for each in crossings if 0.0 <= each <= 1.0]
    return max(inside, key=lambda weight: min(a + weight * slope for a, slope in lines))


def _solved(
    built: Built, weight: float | None, gap: float, until: float, solver: Solver, overlaps: float = 1.0
) -> Solution:
    found = solver(built.problem(weight, overlaps), gap=gap, time_limit_s=max(until - time.monotonic(), LEAST_S))
    if found.choice is None and found.stop.reason in ("time_limit", "interrupted"):
        raise UserError(
            f"the search on mesh {built.mesh} ended before anything that fits was found: {found.stop.because}",
            hint="give it more time",
        )
    if found.choice is None:
        raise UserError(
            f"no shardings fit on mesh {built.mesh}: {found.stop.because}",
            hint="give more devices, a smaller batch, or a device with more memory",
        )
    return found


def _stop(solutions: Sequence[Solution], left: float, gap: float, late: bool) -> str:
    """Text of the reason why a search ended with a gap of ``left``."""
    reasons = {each.stop.reason for each in solutions}
    if "interrupted" in reasons:
        return "interrupted"
    if left <= max(gap, ENOUGH):
        return f"nearer than the {gap:.2g} that were asked for" if left > 1e-6 else PROVED
    if late or "time_limit" in reasons:
        return f"time ran out with {left:.2g} left"
    return f"the bounds of the relaxed overlap leave {left:.2g}"


def _plan(
    built: Built, overlaps: float, solutions: Sequence[Solution], bound_s: float, gap: float, *, late: bool = False
) -> ShardingPlan:
    choices = [np.asarray(each) for each in dict.fromkeys(each.choice for each in solutions)]
    if overlaps:
        problem = built.problem()
        choices = [descended(built, problem, each, overlaps) for each in choices]
    choice = min(choices, key=lambda each: step_of(built.parts_s(each), overlaps))
    step_s = step_of(built.parts_s(choice), overlaps)
    bound_s = min(bound_s if overlaps else solutions[0].bound_s, step_s)
    return ShardingPlan(
        built=built,
        choice=choice,
        overlaps=overlaps,
        bound_s=bound_s,
        stop=_stop(solutions, (step_s - bound_s) / step_s if step_s else 0.0, gap, late),
        cpu_s=sum(each.cpu_s for each in solutions),
        solutions=tuple(solutions),
    )
