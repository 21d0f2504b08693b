"""Searches every candidate of a space: enumerate, check memory, cost each distinct layer once, rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from steptime.estimate.memory import peak_bytes
from steptime.estimate.result import planned_job
from steptime.estimate.single import Setting
from steptime.estimate.sizes import Sizes
from steptime.estimate.step_inputs import MESSAGES_REGARDLESS, unlinked_inputs
from steptime.estimate.traffic import PARAMETERS_REGARDLESS
from steptime.num import Array, distinct, places_in_runs
from steptime.plan.plans import FULL_RECOMPUTE, MEMORY, RISK, Plans, as_float, rows_of
from steptime.plan.space import Constraint, Listing, Space
from steptime.plan.strategies import Strategy
from steptime.records import rows
from steptime.search.layers import SHAPE_COLUMNS, distinct_rows, inner_columns, layer_table, shapes_of
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
    """Quantity to minimise; None: the time of a step."""

    def listed(self) -> Listing:
        """Candidates of the search."""
        setting, machine = self.setting, self.setting.machine
        return self.space.list(
            setting.job, self.strategy, machine.fast_domain, setting.rules, self.constraints,
            nearer_is_faster=machine.nearer_is_faster, farthest=machine.farthest,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Outcome of one search before the winners are explained."""

    task: Task
    candidates: int
    feasible: int
    costed: int
    """Candidates whose time was computed; the others that fit have a lower bound above the times to beat."""
    reasons: dict[str, int]
    best_s: Array
    """Step times, or values of the objective, of the best candidates, ascending."""
    best: Plans
    risky_s: Array
    """The same numbers of candidates whose chance of running out of memory exceeds the limit; empty without one."""
    risky: Plans
    energy: EnergyFront | None
    """Front of time and energy; None without an objective."""
    front_s: Array
    front_bytes: Array
    front: Plans
    nearest: Plans | None
    """Configuration with the smallest memory if nothing fits."""
    likely_s: float
    """Step time of the fastest candidate that likely does not run out of memory; infinite if there is none."""
    likely: Plans | None
    distinct_layers: int
    """Number of layer configurations that were costed for all searches that share them."""


def search(tasks: Sequence[Task], top: int, progress: Progress | None = None) -> list[Found]:
    """Runs searches that share model, strategy, device and links, costing their common layers once.

    Args:
        tasks: searches with the same method, strategy, model, precision and machine. Number of devices, batch, size of
            the fast domain and constraints may differ.
        top: number of best candidates to keep of each.
        progress: called with candidates done and all candidates.
    """
    setting, strategy = tasks[0].setting, tasks[0].strategy
    listings = [task.listed() for task in tasks]
    configured, placements = [one.configurations for one in listings], [one.placements for one in listings]
    lengths, places = [len(one.mesh_of) for one in listings], [rows_of(one) for one in placements]
    # Layers whose rows have the same sizes are one shape; layers of one shape with the same placement of ranks in fast
    # domains take equally long. Each pair of shape and placement is costed once for all searches.
    codes = distinct_rows(configured, lengths, _shape_columns(setting, configured))
    shapes = shapes_of(strategy, setting.job, codes)
    inner = distinct_rows(placements, places, inner_columns(setting.job, setting.machine))
    insides = np.split(inner.inverse, np.cumsum(places)[:-1])
    fitting = [
        _configured(task, listing, shape, rows(shapes.sizes, shape))
        for task, listing, shape in zip(tasks, listings, np.split(codes.inverse, np.cumsum(lengths)[:-1]), strict=True)
    ]
    used = np.zeros((shapes.count, inner.count), dtype=bool)
    for listing, inside, fits in zip(listings, insides, fitting, strict=True):
        mesh = listing.mesh_of[fits.at]
        one, _ = distinct([mesh, fits.shape])
        counts = listing.placement_count[mesh[one]]
        place = np.repeat(listing.placement_start[mesh[one]], counts) + places_in_runs(counts)
        used[np.repeat(fits.shape[one], counts), inside[place]] = True
    table = layer_table(strategy, setting.job, setting.machine, shapes, inner, used)
    done, total, out = 0, sum(listing.candidates for listing in listings), list[Found]()
    for task, listing, inside, fits in zip(tasks, listings, insides, fitting, strict=True):
        of = Fitting(
            setting=task.setting, configured=fits, listing=listing, inner=inside,
            placements=as_float(listing.placements), table=table, counts=listing.multiplicity[fits.at],
        )  # fmt: skip
        wanted = task.objective
        priced = None if wanted is None else Priced(wanted, task.setting, fits.planned.plans)
        ranking = Ranking(of, top, priced)
        before = done + listing.candidates - ranking.within
        for settled in ranking.run():
            if progress is not None:
                progress(before + settled, total)
        out.append(_found(task, listing, ranking))
        done += listing.candidates
    return out


def _shape_columns(setting: Setting, alike: Sequence[Plans]) -> tuple[str, ...]:
    """Columns of plans that the rows of the job depend on: those of :data:`SHAPE_COLUMNS` that are read, and others.

    Kinds of layers depend on the stages. Passes once a step or after each gathering depend on the gathered state and
    the number of gatherings. On a network with separate levels the place of groups of experts depends on the replicas.
    """
    job = setting.job
    unread = set()
    codes = [np.asarray(each.recompute) for each in alike]
    whole = all(((code == 0) | (code == FULL_RECOMPUTE)).all() for code in codes)
    passes = job.copied_parameters or job.precision.quantised_bytes is not None
    if whole and job.attention == "fused" and not passes:
        unread.add("recompute")
    if not job.model.tied_embeddings and not job.model.kinds:
        unread.add("pp")
    if job.model.experts is None:
        unread.update(("ep", "etp"))
    more = {"vpp"} if job.model.kinds else set()
    if job.model.experts is not None and setting.machine.levels_apart:
        more.add("dp")
    if passes:
        more |= {"dp", "zero", "shard", "recompute_every"}
    return (*(name for name in SHAPE_COLUMNS if name not in unread), *sorted(more - set(SHAPE_COLUMNS)))


def _configured(task: Task, listing: Listing, shape: Array, sizes: Sizes) -> Configured:
    """The configurations that fit; their memory does not depend on the placement.

    Args:
        task: the search.
        listing: its candidates.
        shape: code of the shape of each configuration.
        sizes: sizes on a device, by shape.
    """
    setting, machine, plans = task.setting, task.setting.machine, listing.configurations
    every = planned_job(setting.method, task.strategy, setting.job, as_float(plans), sizes)
    peak = np.broadcast_to(np.asarray(peak_bytes(every)), shape.shape)
    at = np.flatnonzero(peak <= machine.memory_bytes)
    fit = plans.take(at)
    planned = every.take(at, as_float(fit))
    return Configured(
        at=at, planned=planned, every=peak, peak=peak[at], shape=shape[at],
        unlinked=unlinked_inputs(planned, machine),
        messages=kinds_of(fit, len(at), MESSAGES_REGARDLESS),
        parameters=kinds_of(fit, len(at), PARAMETERS_REGARDLESS),
    )  # fmt: skip


def _found(task: Task, listing: Listing, ranking: Ranking) -> Found:
    """Outcome of a search."""
    fits, priced, likely, front = ranking.of.configured, ranking.priced, ranking.likely, ranking.front()
    refused, lost = ({}, 0) if priced is None else (priced.refused, priced.lost)
    feasible, every = ranking.within - ranking.risky - lost, fits.every
    over = int(listing.multiplicity[every > task.setting.machine.memory_bytes].sum())
    reasons = listing.rejected | ({MEMORY: over} if over else {}) | ({RISK: ranking.risky} if ranking.risky else {})

    def plans(configuration: Array, placement: Array) -> Plans:
        return placed(listing.configurations.take(configuration), listing.placements.take(placement))

    nearest = None
    if not feasible and not refused and len(some := np.flatnonzero(listing.multiplicity > 0)):
        least = some[[np.argmin(every[some])]]
        nearest = plans(least, listing.placement_start[listing.mesh_of[least]])
    return Found(
        task=task, candidates=listing.candidates, feasible=feasible, costed=ranking.costed,
        energy=None if priced is None else priced.front(plans(*priced.ids.T)), reasons=reasons | refused,
        best_s=ranking.best.values, best=plans(*ranking.best.ids.T),
        risky_s=ranking.risky_best.values, risky=plans(*ranking.risky_best.ids.T),
        front_s=ranking.time_s[front], front_bytes=ranking.peak[front],
        front=plans(fits.at[front], ranking.place[front]), nearest=nearest,
        likely_s=ranking.likely_s, likely=None if likely is None else plans(likely[:1], likely[1:]),
        distinct_layers=ranking.of.table.count,
    )  # fmt: skip
