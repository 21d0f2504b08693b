"""Comparison of the planner, other searches and manual recipes on one problem under one cost: quality over CPU time."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final

import numpy as np

from steptime.api.request import NameOrPath, cluster_given, whole
from steptime.captured.graph import Program
from steptime.errors import UnknownNameError
from steptime.estimate.result import SCHEMA_VERSION, Estimate
from steptime.hardware.records import Cluster
from steptime.options import MAX_DEVICES
from steptime.options import number as number_in
from steptime.sharding.build import Built
from steptime.sharding.costing import Costing, costing_of
from steptime.sharding.flow import flow_of
from steptime.sharding.ilp import Solution, solve
from steptime.sharding.local_search import Budget, Point
from steptime.sharding.mesh import Mesh, logical_meshes, mesh_on, parse_axes
from steptime.sharding.planner import ShardingPlan, planned
from steptime.sharding.portfolio import EACH_S, with_others
from steptime.sharding.problem import Problem
from steptime.sharding.recipes import RECIPES, followed
from steptime.sharding.shard import captured_step
from steptime_lab.planners.searches import BASELINES, search

PLANNER: Final = "planner"
GAP: Final = 1e-6
"""Optimality gap of the planner: small, so that it loses to another method by rounding alone."""
SEARCHES_S: Final = 2.0
"""Default CPU seconds of all searches together."""
PLANNER_S: Final = 30.0
"""Time limit of the planner."""
ROUND_S: Final = 15.0
"""Least time limit of each round of the planner, in which moments are added."""
RECIPE_S: Final = 5.0
"""CPU seconds of the solver for choices that a recipe leaves open."""
LEAST_S: Final = 0.01
"""Least CPU seconds of a search, however long the searches before it took."""
NEEDS: Final = {"bayesian": "optuna", "learned": "sklearn"}
"""Baselines that need a package of the extra ``learn``."""
METHODS: Final = (*(name for name in BASELINES if name != "exact"), *RECIPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Result of one method."""

    name: str
    step_s: float | None = None
    """Step time; None: no choice fits."""
    cpu_s: float = 0.0
    evaluations: int = 0
    stop: str = ""
    points: tuple[Point, ...] = ()
    choice: Sequence[int] | None = None
    """Option of each item; None: no choice fits."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All methods on one problem; nothing overlaps."""

    model: str
    cluster: str
    mesh: Mesh
    plan: ShardingPlan
    entries: tuple[Entry, ...]
    """Results, the planner's first."""
    limit_bytes: float
    bound_s: float
    """Lower bound of the step time of every method."""
    estimate: Estimate | None = None
    """Estimate of the planner's choice; None: times are of the devices alone."""

    @property
    def best_other(self) -> Entry | None:
        """The best of the methods other than the planner."""
        found = [each for each in self.entries[1:] if each.step_s is not None]
        return min(found, key=lambda each: each.step_s or inf, default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "cluster": self.cluster,
            "mesh": dict(zip(self.mesh.names, self.mesh.sizes, strict=True)),
            "memory_limit_bytes": None if self.limit_bytes == inf else self.limit_bytes,
            **({} if self.estimate is None else self.estimate.to_json()),
            "bound_s": self.bound_s,
            "methods": [
                {
                    "name": each.name,
                    "step_time_s": each.step_s,
                    "over_bound": None if each.step_s is None else each.step_s / self.bound_s,
                    "cpu_s": each.cpu_s,
                    "evaluations": each.evaluations,
                    "stop": each.stop,
                    "points": [
                        {
                            "cpu_s": point.cpu_s,
                            "evaluations": point.evaluations,
                            "step_time_s": point.total_s,
                        }
                        for point in each.points
                    ],
                }
                for each in self.entries
            ],
        }


def planners(
    model: str | Program,
    cluster: NameOrPath | Cluster,
    *,
    gpus: int,
    mesh: str | None = None,
    memory_bytes: float | None = None,
    methods: Sequence[str] | None = None,
    cpu_s: float = SEARCHES_S,
    seed: int = 0,
    framework: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    **captured: Any,
) -> Comparison:
    """The planner, other searches and manual recipes on the shardings of one training step.

    Args:
        model: the model argument of :func:`steptime.sharding.shard.shard`, which also documents those of the capture.
        cluster: catalogue name, file, or the record.
        gpus: devices of the mesh.
        mesh: ``data=2,model=4`` or ``2x4``; None: two axes, as equal as the devices allow.
        memory_bytes: memory of a device for tensors; None: all that it has; infinite: no limit.
        methods: names of baselines and recipes; None: all.
        cpu_s: CPU seconds of all searches together, in equal parts; later searches get time that earlier ones leave.
            Planner and recipes stop by themselves, or after 30 and 5 s.
        seed: seed of the random numbers.
        framework: framework argument of :func:`steptime.sharding.shard.shard`.
        progress: called with methods done and methods to run.

    Raises:
        UserError: the module cannot be captured, a name is unknown, or nothing fits.
    """
    whole("gpus", gpus, 2, MAX_DEVICES)
    number_in("cpu_s", cpu_s, 1e-3, 1e9, "CPU seconds of all searches together")
    names = tuple(name for name in methods or METHODS if name != PLANNER)
    for name in names:
        if name not in RECIPES and name not in BASELINES:
            raise UnknownNameError("method", name, METHODS)
    machines = cluster_given(cluster)
    program = model if isinstance(model, Program) else captured_step(model, machines, **captured)
    axes = mesh or "x".join(map(str, min(logical_meshes(gpus), key=max)))
    where = mesh_on(machines, parse_axes(axes), gpus)
    costing = costing_of(program, machines, gpus, framework=framework, overlaps=False)
    limit = costing.room_bytes if memory_bytes is None else memory_bytes
    problem = costing.built(flow_of(costing.program), where, limit)
    found = compared(
        problem, names, cpu_s=cpu_s, seed=seed, progress=progress, model=program.name, cluster=machines.name
    )
    return replace(
        found,
        estimate=costing.of(found.plan).estimate,
        bound_s=costing.least_s(found.bound_s),
        entries=tuple(_whole(each, found.plan, costing) for each in found.entries),
    )


def _whole(entry: Entry, plan: ShardingPlan, costing: Costing) -> Entry:
    """A result with the estimated step time of its choice; times along the search get the least that a step adds."""
    points = tuple(replace(point, total_s=costing.least_s(point.total_s)) for point in entry.points)
    if entry.choice is None:
        return replace(entry, points=points)
    return replace(entry, points=points, step_s=costing.of(replace(plan, choice=np.asarray(entry.choice))).step_s)


def compared(
    given: Built,
    methods: Sequence[str] = METHODS,
    *,
    cpu_s: float,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    model: str = "",
    cluster: str = "",
) -> Comparison:
    """The planner and some methods on a built problem; an interruption keeps the results up to then."""
    began = time.process_time()
    plan = planned(given, overlaps=False, gap=GAP, seconds=PLANNER_S, solver=_patient)
    plan = with_others(plan, GAP, EACH_S, inf)
    spent_s = time.process_time() - began
    problem = plan.built.problem(None)
    first = Point(cpu_s=spent_s, evaluations=1, total_s=plan.step_s)
    entries = [
        Entry(
            name=PLANNER,
            step_s=plan.step_s,
            cpu_s=spent_s,
            evaluations=1,
            stop=plan.stop,
            points=(first,),
            choice=plan.choice.tolist(),
        )
    ]
    left_s, searches = cpu_s, sum(name in BASELINES for name in methods)
    for number, name in enumerate(methods):
        if progress is not None:
            progress(number, len(methods))
        began = time.process_time()
        try:
            entries.append(_entry(name, plan.built, problem, left_s / max(searches, 1), seed))
        except KeyboardInterrupt:
            entries.append(Entry(name=name, stop="interrupted"))
        if entries[-1].stop == "interrupted":
            break
        if name in BASELINES:
            left_s, searches = max(left_s - (time.process_time() - began), LEAST_S), searches - 1
    return Comparison(
        model=model,
        cluster=cluster,
        mesh=given.mesh,
        plan=plan,
        entries=tuple(entries),
        limit_bytes=given.limit_bytes,
        bound_s=plan.bound_s,
    )


def _patient(problem: Problem, *, gap: float, time_limit_s: float) -> Solution:
    """The solver with at least `ROUND_S` for each round, so that the last round of the planner is not cut short."""
    return solve(problem, gap=gap, time_limit_s=max(time_limit_s, ROUND_S))


def _entry(name: str, given: Built, problem: Problem, cpu_s: float, seed: int) -> Entry:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        return Entry(name=name, stop=f"skipped: needs {NEEDS[name]}; pip install 'steptime[learn]'")
    found, why = (
        followed(name, given, problem, Budget(cpu_s=RECIPE_S))
        if name in RECIPES
        else (search(name, problem, Budget(cpu_s=cpu_s), seed), "")
    )
    if found is None:
        return Entry(name=name, stop=why)
    return Entry(
        name=name,
        step_s=None if found.choice is None else found.total_s,
        cpu_s=found.cpu_s,
        evaluations=found.evaluations,
        stop=found.stop,
        points=found.points,
        choice=found.choice,
    )
