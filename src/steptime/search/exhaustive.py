"""Searches every candidate of a space: enumerate, check memory, cost each distinct layer once, rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from steptime.dataclass import dataclass
from steptime.estimate.memory import peak_bytes
from steptime.estimate.result import planned_job
from steptime.estimate.single import Setting
from steptime.estimate.step_inputs import MESSAGES_REGARDLESS, layout_of, unlinked_inputs
from steptime.estimate.traffic import PARAMETERS_REGARDLESS, layer_copy_s
from steptime.num import Array, places_in_runs
from steptime.plan.job import Job
from steptime.plan.plans import FULL_RECOMPUTE, MEMORY, RISK, Plans, as_float, rows_of
from steptime.plan.space import Configurations, Constraint, Listing, Space
from steptime.plan.strategies import Strategy
from steptime.records import distinct, rows
from steptime.search.layers import (
    SHAPE_COLUMNS,
    Codes,
    LayerTable,
    Shapes,
    distinct_rows,
    inner_columns,
    layer_table,
    shapes_of,
)
from steptime.search.objective import Objective
from steptime.search.priced import EnergyFront, Priced
from steptime.search.ranking import Configured, Fitting, Ranking, kinds_of, placed

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One search: a setting, a strategy and its space."""

    setting: Setting
    strategy: Strategy
    space: Space
    constraints: tuple[Constraint, ...] = ()
    objective: Objective | None = None
    """What is least; None: the time of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Outcome of one search before the winners are explained."""

    task: Task
    candidates: int
    feasible: int
    costed: int
    """Candidates whose time was computed; the others that fit have a lower bound above what they would have to beat."""
    reasons: dict[str, int]
    best_s: Array
    """What is least of the best, ascending: times of a step, or values of the objective."""
    best: Plans
    risky_s: Array
    """The same of those more likely to run out of memory than a first plan may be; empty without a limit."""
    risky: Plans
    energy: EnergyFront | None
    """Front of time and energy, where there is an objective."""
    front_s: Array
    front_bytes: Array
    front: Plans
    nearest: Plans | None
    """Configuration of least memory, where nothing fits."""
    likely_s: float
    """Step time of the fastest that likely does not run out of memory; infinite where there is none."""
    likely: Plans | None
    distinct_layers: int
    """Layer configurations that were costed for the whole group of searches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Configured:
    """Configurations of a job with their memory, which tasks that differ in their fast domains share."""

    listed: Configurations
    shape: Array
    peak: Array
    fits: Configured


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    """A task with its candidates listed and coded."""

    task: Task
    configured: _Configured
    listing: Listing
    inner: Array


def search(tasks: Sequence[Task], top: int, progress: Progress | None = None) -> list[Found]:
    """Runs searches that share model, strategy, device and links, costing their common layers once.

    Args:
        tasks: searches; all with the same method, strategy, model, precision and machine, the size of the fast domain
            apart. Number of devices, batch, fast domain and constraints may differ.
        top: how many best candidates to keep of each.
        progress: called with candidates done and all candidates.
    """
    owners, owner_of = _distinct_jobs(tasks)
    alike = [
        task.space.configured(task.setting.job, task.strategy, task.setting.rules, task.constraints) for task in owners
    ]
    lengths = [len(each.mesh_of) for each in alike]
    job, strategy = tasks[0].setting.job, tasks[0].strategy
    codes = distinct_rows([each.plans for each in alike], lengths, _shape_columns(job, alike))
    shapes = shapes_of(strategy, job, codes)
    each_shape = _split(codes.inverse, lengths)
    configured = [
        _configured(task, each, shapes, shape) for task, each, shape in zip(owners, alike, each_shape, strict=True)
    ]
    listings = [_listing(task, configured[owner].listed) for task, owner in zip(tasks, owner_of, strict=True)]
    placed = [rows_of(listing.placements) for listing in listings]
    inner = distinct_rows([each.placements for each in listings], placed, inner_columns(job, tasks[0].setting.machine))
    listed = [
        _Listed(task=task, configured=configured[owner], listing=listing, inner=inside)
        for task, owner, listing, inside in zip(tasks, owner_of, listings, _split(inner.inverse, placed), strict=True)
    ]
    table = _table(listed, shapes, inner)
    total = sum(each.listing.candidates for each in listed)
    done, out = 0, []
    for each in listed:
        out.append(_ranked(each, table, top, _offset(progress, done, total)))
        done += each.listing.candidates
    return out


def _distinct_jobs(tasks: Sequence[Task]) -> tuple[list[Task], list[int]]:
    """The first task of each job in its space and memory, and which of these each task is like."""
    owners: list[Task] = []
    keys: list[tuple[Any, ...]] = []
    owner_of = []
    for task in tasks:
        setting, job, machine = task.setting, task.setting.job, task.setting.machine
        on_plan = [each for each in task.constraints if not each.column.startswith("in_")]
        host = (machine.host_Bps, machine.host_ranks) if job.offload else ()
        key = job.gpus, job.global_batch, machine.memory_bytes, host, on_plan, job, task.space, setting.rules
        owner = next((n for n, other in enumerate(keys) if other == key), len(keys))
        if owner == len(keys):
            keys.append(key)
            owners.append(task)
        owner_of.append(owner)
    return owners, owner_of


def _shape_columns(job: Job, alike: list[Configurations]) -> tuple[str, ...]:
    """Leaves out columns that this job's rows do not read, and adds those that only some jobs' rows do.

    Rows of experts depend on ``dp``, kinds of layers on the stages; passes once a step or after each gathering on what
    is gathered, and how often.
    """
    unread = set()
    codes = [np.asarray(each.plans.recompute) for each in alike]
    whole = all(((code == 0) | (code == FULL_RECOMPUTE)).all() for code in codes)
    passes = job.copied_parameters or job.precision.quantised_bytes is not None
    if whole and job.attention == "fused" and not passes:
        unread.add("recompute")
    if not job.model.tied_embeddings and not job.model.kinds:
        unread.add("pp")
    if job.model.experts is None:
        unread.update(("ep", "etp"))
    more = {"dp"} if job.model.experts is not None else set()
    if job.model.kinds:
        more.add("vpp")
    if passes:
        more |= {"dp", "zero", "shard", "recompute_every"}
    return (*(name for name in SHAPE_COLUMNS if name not in unread), *sorted(more - set(SHAPE_COLUMNS)))


def _listing(task: Task, configured: Configurations) -> Listing:
    machine = task.setting.machine
    return task.space.placed(
        configured,
        task.setting.job,
        task.strategy,
        machine.fast_domain,
        task.constraints,
        nearer_is_faster=machine.nearer_is_faster,
        farthest=1 if machine.network is None else machine.network.farthest,
    )


def _split(codes: Array, lengths: list[int]) -> list[Array]:
    return np.split(codes, np.cumsum(lengths)[:-1])


def _offset(progress: Progress | None, done: int, total: int) -> Callable[[int], None]:
    return (lambda here: progress(done + here, total)) if progress else (lambda _: None)


def _configured(task: Task, listed: Configurations, shapes: Shapes, shape: Array) -> _Configured:
    """Memory of every configuration, which does not depend on the placement, and those that fit."""
    setting, machine = task.setting, task.setting.machine
    method, strategy, job = setting.method, task.strategy, setting.job
    every = planned_job(method, strategy, job, as_float(listed.plans), rows(shapes.sizes, shape))
    peak = np.broadcast_to(np.asarray(peak_bytes(every)), shape.shape)
    at = np.flatnonzero(peak <= machine.memory_bytes)
    whole = listed.plans.take(at)
    planned = every.take(at, as_float(whole))
    fits = Configured(
        at=at, planned=planned, peak=peak[at], shape=shape[at],
        unlinked=unlinked_inputs(planned, machine, layout_of(planned), layer_copy_s(planned, machine)),
        messages=kinds_of(whole, len(at), MESSAGES_REGARDLESS),
        parameters=kinds_of(whole, len(at), PARAMETERS_REGARDLESS),
    )  # fmt: skip
    return _Configured(listed=listed, shape=shape, peak=peak, fits=fits)


def _table(listed: list[_Listed], shapes: Shapes, inner: Codes) -> LayerTable:
    used = np.zeros((shapes.count, inner.count), dtype=bool)
    for each in listed:
        listing, fits = each.listing, each.configured.fits
        mesh = listing.mesh_of[fits.at]
        one, _ = distinct([mesh, fits.shape])
        counts = listing.placement_count[mesh[one]]
        place = np.repeat(listing.placement_start[mesh[one]], counts) + places_in_runs(counts)
        used[np.repeat(fits.shape[one], counts), each.inner[place]] = True
    task = listed[0].task
    return layer_table(task.strategy, task.setting.job, task.setting.machine, shapes, inner, used)


def _ranked(each: _Listed, table: LayerTable, top: int, progress: Callable[[int], None]) -> Found:
    """Ranks the candidates of one task."""
    listing, setting, fits = each.listing, each.task.setting, each.configured.fits
    multiplicity, at = listing.multiplicity, fits.at
    fitting = Fitting(
        setting=setting, configured=fits, listing=listing, inner=each.inner, placements=as_float(listing.placements),
        table=table,
    )  # fmt: skip
    wanted = each.task.objective
    priced = None if wanted is None else Priced(wanted, setting, fits.planned.plans)
    ranking, within = Ranking(fitting, top, priced), int(multiplicity[at].sum())
    ranking.run(lambda settled: progress(listing.candidates - within + settled))
    refused, lost = ({}, 0) if priced is None else (priced.refused, priced.lost)
    front, feasible, first = ranking.front(), within - ranking.risky - lost, ranking.likely
    likely = None if first is None else _plans(listing, at[first[:1]], first[1:])
    return Found(
        task=each.task, candidates=listing.candidates, feasible=feasible, costed=ranking.costed,
        energy=None if priced is None else priced.front(_plans(listing, priced.ids[:, 0], priced.ids[:, 1])),
        reasons=_reasons(each, multiplicity, ranking.risky) | refused, best_s=ranking.best.values,
        best=_plans(listing, ranking.best.ids[:, 0], ranking.best.ids[:, 1]), risky_s=ranking.risky_best.values,
        risky=_plans(listing, ranking.risky_best.ids[:, 0], ranking.risky_best.ids[:, 1]),
        front_s=ranking.time_s[front], front_bytes=fits.peak[front],
        front=_plans(listing, at[front], ranking.place[front]),
        nearest=None if feasible or refused else _nearest(each, multiplicity), distinct_layers=table.count,
        likely_s=ranking.likely_s, likely=likely,
    )  # fmt: skip


def _plans(listing: Listing, configuration: Array, placement: Array) -> Plans:
    return placed(listing.configurations.take(configuration), listing.placements.take(placement))


def _reasons(each: _Listed, multiplicity: Array, risky: int) -> dict[str, int]:
    out = dict(each.listing.rejected)
    over = int(multiplicity[each.configured.peak > each.task.setting.machine.memory_bytes].sum())
    return out | ({MEMORY: over} if over else {}) | ({RISK: risky} if risky else {})


def _nearest(each: _Listed, multiplicity: Array) -> Plans | None:
    """Configuration that lacks least memory."""
    placed = np.flatnonzero(multiplicity > 0)
    if not len(placed):
        return None
    chosen = placed[np.argmin(each.configured.peak[placed])]
    start = each.listing.placement_start[each.listing.mesh_of[chosen]]
    return _plans(each.listing, np.array([chosen]), np.array([start]))
