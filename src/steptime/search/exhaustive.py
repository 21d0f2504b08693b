"""Searches every candidate of a space: enumerate, check memory, cost each distinct layer once, rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from steptime.dataclass import dataclass
from steptime.estimate.machine import Machine
from steptime.estimate.memory import peak_bytes
from steptime.estimate.result import planned_job
from steptime.estimate.single import Setting
from steptime.num import Array
from steptime.plan.job import Job
from steptime.plan.plans import FULL_RECOMPUTE, MEMORY, RISK, Plans, as_float, rows_of
from steptime.plan.space import Constraint, Listing, Space
from steptime.plan.strategies import Strategy
from steptime.search.layers import (
    SHAPE_COLUMNS,
    Codes,
    LayerTable,
    Shapes,
    distinct_rows,
    inner_columns,
    layer_table,
    shapes_of,
    take_sizes,
)
from steptime.search.objective import Objective
from steptime.search.priced import EnergyFront, Priced
from steptime.search.ranking import Fitting, Ranking, placed

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
class _Listed:
    """A task with its candidates listed and coded."""

    task: Task
    listing: Listing
    rows: int
    shape: Array
    inner: Array
    peak: Array


def search(tasks: Sequence[Task], top: int, progress: Progress | None = None) -> list[Found]:
    """Runs searches that share model, strategy, device and links, costing their common layers once.

    Args:
        tasks: searches; all with the same method, strategy, model, precision and machine, the size of the fast domain
            apart. Number of devices, batch, fast domain and constraints may differ.
        top: how many best candidates to keep of each.
        progress: called with candidates done and all candidates.
    """
    listings = [_listing(task) for task in tasks]
    rows = [len(listing.mesh_of) for listing in listings]
    first = tasks[0]
    job, strategy = first.setting.job, first.strategy
    codes = distinct_rows([li.configurations for li in listings], rows, _shape_columns(job, listings))
    shapes = shapes_of(strategy, job, codes)
    placed = [rows_of(li.placements) for li in listings]
    inner = distinct_rows([li.placements for li in listings], placed, inner_columns(job, first.setting.machine))
    listed = [
        _listed(task, listing, shapes, shape, inside)
        for task, listing, shape, inside in zip(
            tasks, listings, _split(codes.inverse, rows), _split(inner.inverse, placed), strict=True
        )
    ]
    table = _table(listed, shapes, inner)
    total = sum(li.listing.candidates for li in listed)
    done, out = 0, []
    for each in listed:
        out.append(_ranked(each, table, shapes, top, _offset(progress, done, total)))
        done += each.listing.candidates
    return out


def _shape_columns(job: Job, listings: list[Listing]) -> tuple[str, ...]:
    """Leaves out columns that this job's rows do not read, and adds those that only some jobs' rows do.

    Rows of experts depend on ``dp``, kinds of layers on the stages; passes once a step or after each gathering on what
    is gathered, and how often.
    """
    unread = set()
    codes = [np.asarray(listing.configurations.recompute) for listing in listings]
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


def _listing(task: Task) -> Listing:
    setting, machine = task.setting, task.setting.machine
    return task.space.list(
        setting.job, task.strategy, machine.fast_domain, setting.rules, task.constraints,
        nearer_is_faster=machine.nearer_is_faster, farthest=1 if machine.network is None else machine.network.farthest,
    )  # fmt: skip


def _split(codes: Array, lengths: list[int]) -> list[Array]:
    return np.split(codes, np.cumsum(lengths)[:-1])


def _offset(progress: Progress | None, done: int, total: int) -> Callable[[int], None]:
    return (lambda here: progress(done + here, total)) if progress else (lambda _: None)


def _listed(task: Task, listing: Listing, shapes: Shapes, shape: Array, inner: Array) -> _Listed:
    """Memory of every configuration: it does not depend on the placement."""
    setting, rows = task.setting, len(listing.mesh_of)
    planned = planned_job(
        setting.method, task.strategy, setting.job, as_float(listing.configurations), take_sizes(shapes.sizes, shape)
    )
    return _Listed(task=task, listing=listing, rows=rows, shape=shape, inner=inner,
                   peak=np.broadcast_to(np.asarray(peak_bytes(planned)), (rows,)))  # fmt: skip


def _table(listed: list[_Listed], shapes: Shapes, inner: Codes) -> LayerTable:
    wanted = np.zeros(shapes.count, dtype=bool)
    for each in listed:
        fits = each.peak <= each.task.setting.machine.memory_bytes
        wanted[each.shape[fits & (each.listing.multiplicity > 0)]] = True
    task = listed[0].task
    machine: Machine = task.setting.machine
    return layer_table(task.strategy, task.setting.job, machine, shapes, wanted, inner)


def _ranked(each: _Listed, table: LayerTable, shapes: Shapes, top: int, progress: Callable[[int], None]) -> Found:
    """Ranks the candidates of one task."""
    listing, setting, multiplicity = each.listing, each.task.setting, each.listing.multiplicity
    at = np.flatnonzero((each.peak <= setting.machine.memory_bytes) & (multiplicity > 0))
    fitting = Fitting(
        setting=setting, strategy=each.task.strategy, listing=listing, at=at,
        configurations=as_float(listing.configurations.take(at)), sizes=take_sizes(shapes.sizes, each.shape[at]),
        peak=each.peak[at], shape=each.shape[at], inner=each.inner, placements=as_float(listing.placements),
        table=table,
    )  # fmt: skip
    wanted = each.task.objective
    priced = None if wanted is None else Priced(wanted, setting, fitting.configurations)
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
        front_s=ranking.time_s[front], front_bytes=fitting.peak[front],
        front=_plans(listing, at[front], ranking.place[front]),
        nearest=None if feasible or refused else _nearest(each, multiplicity), distinct_layers=table.count,
        likely_s=ranking.likely_s, likely=likely,
    )  # fmt: skip


def _plans(listing: Listing, configuration: Array, placement: Array) -> Plans:
    return placed(listing.configurations.take(configuration), listing.placements.take(placement))


def _reasons(each: _Listed, multiplicity: Array, risky: int) -> dict[str, int]:
    out = dict(each.listing.rejected)
    over = int(multiplicity[each.peak > each.task.setting.machine.memory_bytes].sum())
    return out | ({MEMORY: over} if over else {}) | ({RISK: risky} if risky else {})


def _nearest(each: _Listed, multiplicity: Array) -> Plans | None:
    """Configuration that lacks least memory."""
    placed = np.flatnonzero(multiplicity > 0)
    if not len(placed):
        return None
    chosen = placed[np.argmin(each.peak[placed])]
    start = each.listing.placement_start[each.listing.mesh_of[chosen]]
    return _plans(each.listing, np.array([chosen]), np.array([start]))
