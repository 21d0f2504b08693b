"""Searches every candidate of a space: enumerate, check memory, cost each distinct layer once, rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from steptime.estimate.machine import Machine
from steptime.estimate.memory import peak_bytes
from steptime.estimate.result import planned_job
from steptime.estimate.single import Setting
from steptime.estimate.step_inputs import MESSAGES_REGARDLESS, layout_of, unlinked_inputs
from steptime.estimate.traffic import PARAMETERS_REGARDLESS, layer_copy_s
from steptime.num import Array, distinct, places_in_runs
from steptime.plan.plans import FULL_RECOMPUTE, MEMORY, RISK, Plans, as_float, concatenate, rows_of
from steptime.plan.space import Configurations, Constraint, Listing, Space
from steptime.plan.strategies import Strategy
from steptime.records import rows
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
from steptime.search.ranking import Configured, Fitting, Ranking, kinds_of, placed, rank

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
class _Job:
    """A job that some tasks have, with its configurations."""

    task: Task
    """The first of them; below the places of all."""
    places: Sequence[int]
    listed: Configurations
    shape: Array
    """Code of each configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """Configurations, with their memory, of jobs that differ in their number of devices alone, one job after another.

    Tasks that differ in their fast domains share them.
    """

    plans: Plans
    mesh_of: Array
    peak: Array
    fits: Configured
    meshes: Sequence[slice]
    """Of each job; below its configurations, and its among those that fit."""
    whole: Sequence[slice]
    parts: Sequence[slice]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """A task with its candidates listed."""

    task: Task
    place: int
    """Which of all tasks it is; below which of the jobs of a table it has."""
    job: int
    listing: Listing


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wave:
    """Searches that are ranked together: on one machine, of different jobs with their configurations in one table."""

    searches: Sequence[_Search]
    table: _Table
    listing: Listing
    """Candidates of all of them."""

    @property
    def candidates(self) -> int:
        """Of all searches, those that break a rule among them."""
        return sum(each.listing.candidates for each in self.searches)


def search(tasks: Sequence[Task], top: int, progress: Progress | None = None) -> list[Found]:
    """Runs searches that share model, strategy, device and links, costing their common layers once.

    Args:
        tasks: searches; all with the same method, strategy, model, precision and machine, the size of the fast domain
            apart. Number of devices, batch, fast domain and constraints may differ.
        top: how many best candidates to keep of each.
        progress: called with candidates done and all candidates.
    """
    job, machine = tasks[0].setting.job, tasks[0].setting.machine
    jobs, shapes = _jobs(tasks)
    waves: list[_Wave] = []
    for alike in _groups([each.task for each in jobs], _table_key):
        waves += _waves(tasks, [jobs[n] for n in alike], shapes)
    lengths = [rows_of(wave.listing.placements) for wave in waves]
    inner = distinct_rows([wave.listing.placements for wave in waves], lengths, inner_columns(job, machine))
    inside = _split(inner.inverse, lengths)
    layers = _layers(waves, inside, shapes, inner)
    done, total = 0, sum(wave.candidates for wave in waves)
    out: dict[int, Found] = {}
    for wave, codes in zip(waves, inside, strict=True):
        out |= _ranked(wave, codes, layers, top, _offset(progress, done, total))
        done += wave.candidates
    return [out[place] for place in range(len(tasks))]


def _groups(tasks: Sequence[Task], key: Callable[[Task], Any]) -> list[list[int]]:
    """Places of tasks with the same key."""
    if len(tasks) == 1:
        return [[0]]
    keys: list[Any] = []
    groups: list[list[int]] = []
    for place, task in enumerate(tasks):
        own = key(task)
        at = next((n for n, other in enumerate(keys) if other == own), len(keys))
        if at == len(keys):
            keys.append(own)
            groups.append([])
        groups[at].append(place)
    return groups


def _job_key(task: Task) -> tuple[Any, ...]:
    """What the configurations of a task and their memory follow from."""
    on_plan = [each for each in task.constraints if not each.column.startswith("in_")]
    return task.setting.job.gpus, on_plan, task.space, task.setting.rules, _table_key(task)


def _table_key(task: Task) -> tuple[Any, ...]:
    """What memory and the time of a step follow from in jobs that differ in their number of devices.

    Energy, and where groups lie in a network, follow from that number too.
    """
    job, machine = task.setting.job, task.setting.machine
    host = (machine.host_Bps, machine.host_ranks) if job.offload else ()
    devices = job.gpus if machine.levels_apart or task.objective is not None else 0
    return job.global_batch, machine.memory_bytes, host, devices, replace(job, gpus=1)


def _machine_of_transfers(machine: Machine) -> Machine:
    """The machine as far as layers with their transfers go."""
    nearer = None if machine.nearer is None else _machine_of_transfers(machine.nearer)
    return replace(machine, memory_bytes=0.0, host_Bps=0.0, host_basis="", host_ranks=1.0, bound=None, nearer=nearer)


def _wave_key(task: Task) -> tuple[Any, ...]:
    """What ranking follows from, beside the table."""
    return _machine_of_transfers(task.setting.machine), task.setting.oom_limit, task.setting.first_limit


def _jobs(tasks: Sequence[Task]) -> tuple[list[_Job], Shapes]:
    """The distinct jobs of tasks with their configurations, and the shapes of all of these."""
    job, strategy = tasks[0].setting.job, tasks[0].strategy
    groups = _groups(tasks, _job_key)
    first = [tasks[group[0]] for group in groups]
    listed = [each.space.configured(each.setting.job, strategy, each.setting.rules, each.constraints) for each in first]
    lengths = [len(each.mesh_of) for each in listed]
    codes = distinct_rows([each.plans for each in listed], lengths, _shape_columns(tasks[0].setting, listed))
    jobs = [
        _Job(task=task, places=places, listed=each, shape=shape)
        for task, places, each, shape in zip(first, groups, listed, _split(codes.inverse, lengths), strict=True)
    ]
    return jobs, shapes_of(strategy, job, codes)


def _shape_columns(setting: Setting, alike: list[Configurations]) -> tuple[str, ...]:
    """Leaves out columns that this job's rows do not read, and adds those that only some jobs' rows do.

    Kinds of layers depend on the stages; passes once a step or after each gathering on what is gathered, and how often;
    on a network whose levels are told apart, where groups of experts lie on the replicas that they are spread over.
    """
    job = setting.job
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
    more = {"vpp"} if job.model.kinds else set()
    if job.model.experts is not None and setting.machine.levels_apart:
        more.add("dp")
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
        farthest=machine.farthest,
    )


def _split(codes: Array, lengths: list[int]) -> list[Array]:
    return np.split(codes, np.cumsum(lengths)[:-1])


def _offset(progress: Progress | None, done: int, total: int) -> Callable[[int], None]:
    return (lambda here: progress(done + here, total)) if progress else (lambda _: None)


def _configured(jobs: Sequence[_Job], shapes: Shapes) -> _Table:
    """Memory of every configuration, which does not depend on the placement, and those that fit."""
    setting, machine = jobs[0].task.setting, jobs[0].task.setting.machine
    listed = [each.listed for each in jobs]
    lengths, meshes = [len(each.mesh_of) for each in listed], _parts([rows_of(each.meshes) for each in listed])
    plans, shape = concatenate([each.plans for each in listed], lengths), np.concatenate([each.shape for each in jobs])
    every = planned_job(setting.method, jobs[0].task.strategy, setting.job, as_float(plans), rows(shapes.sizes, shape))
    peak = np.broadcast_to(np.asarray(peak_bytes(every)), shape.shape)
    at = np.flatnonzero(peak <= machine.memory_bytes)
    counts = np.diff(np.searchsorted(at, np.cumsum(lengths)), prepend=0).tolist()
    fit = plans.take(at)
    planned = every.take(at, as_float(fit))
    unlinked = unlinked_inputs(planned, machine, layout_of(planned), layer_copy_s(planned, machine))
    if len(jobs) > 1:
        unlinked = replace(unlinked, devices=np.repeat([float(each.task.setting.job.gpus) for each in jobs], counts))
    fits = Configured(
        at=at,
        planned=planned,
        peak=peak[at],
        shape=shape[at],
        unlinked=unlinked,
        messages=kinds_of(fit, len(at), MESSAGES_REGARDLESS),
        parameters=kinds_of(fit, len(at), PARAMETERS_REGARDLESS),
    )
    mesh_of = np.concatenate([each.mesh_of + part.start for each, part in zip(listed, meshes, strict=True)])
    return _Table(
        plans=plans, mesh_of=mesh_of, peak=peak, fits=fits, meshes=meshes, whole=_parts(lengths),
        parts=_parts(counts),
    )  # fmt: skip


def _parts(lengths: Sequence[int]) -> list[slice]:
    """Parts of some lengths that follow each other."""
    stops = np.cumsum(lengths).tolist()
    return [slice(stop - length, stop) for length, stop in zip(lengths, stops, strict=True)]


def _waves(tasks: Sequence[Task], jobs: Sequence[_Job], shapes: Shapes) -> Iterator[_Wave]:
    """Tasks whose configurations are in one table, as they are ranked together: with an objective each alone."""
    table = _configured(jobs, shapes)
    owner = {place: n for n, job in enumerate(jobs) for place in job.places}
    places = list(owner)
    for group in _groups([tasks[place] for place in places], _wave_key):
        left = [places[at] for at in group]
        while left:
            first = {owner[place]: place for place in reversed(left)}
            chosen = left[:1] if tasks[left[0]].objective is not None else [first[n] for n in sorted(first)]
            left = [place for place in left if place not in chosen]
            yield _wave(table, [
                _Search(task=tasks[place], place=place, job=owner[place],
                        listing=_listing(tasks[place], jobs[owner[place]].listed))
                for place in chosen
            ])  # fmt: skip


def _wave(table: _Table, searches: Sequence[_Search]) -> _Wave:
    """Searches with their candidates in one listing."""
    placements = [each.listing.placements for each in searches]
    lengths = [rows_of(each) for each in placements]
    start, count = (np.zeros(table.meshes[-1].stop, dtype=np.int64) for _ in range(2))
    for each, part in zip(searches, _parts(lengths), strict=True):
        start[table.meshes[each.job]] = each.listing.placement_start + part.start
        count[table.meshes[each.job]] = each.listing.placement_count
    listing = Listing(
        configurations=table.plans,
        mesh_of=table.mesh_of,
        placements=concatenate(placements, lengths),
        placement_start=start,
        placement_count=count,
        rejected={},
        rejected_rows=0,
    )
    return _Wave(searches=searches, table=table, listing=listing)


def _layers(waves: Sequence[_Wave], inside: Sequence[Array], shapes: Shapes, inner: Codes) -> LayerTable:
    """Costs of the layers that candidates have; ``inside``: the code of each wave's placements."""
    used = np.zeros((shapes.count, inner.count), dtype=bool)
    for wave, codes in zip(waves, inside, strict=True):
        listing, fits = wave.listing, wave.table.fits
        mesh = listing.mesh_of[fits.at]
        one, _ = distinct([mesh, fits.shape])
        counts = listing.placement_count[mesh[one]]
        place = np.repeat(listing.placement_start[mesh[one]], counts) + places_in_runs(counts)
        used[np.repeat(fits.shape[one], counts), codes[place]] = True
    task = waves[0].searches[0].task
    return layer_table(task.strategy, task.setting.job, task.setting.machine, shapes, inner, used)


def _ranked(
    wave: _Wave, inside: Array, layers: LayerTable, top: int, progress: Callable[[int], None]
) -> dict[int, Found]:
    """Ranks the candidates of some tasks; found by the place of each task."""
    listing, fits = wave.listing, wave.table.fits
    fitting = Fitting(
        setting=wave.searches[0].task.setting, configured=fits, listing=listing, inner=inside,
        placements=as_float(listing.placements), table=layers, counts=listing.multiplicity[fits.at],
    )  # fmt: skip
    rankings = []
    for each in wave.searches:
        wanted = each.task.objective
        priced = None if wanted is None else Priced(wanted, each.task.setting, fits.planned.plans)
        rankings.append(Ranking(fitting, wave.table.parts[each.job], top, priced))
    before = wave.candidates - sum(ranking.within for ranking in rankings)
    rank(fitting, rankings, lambda settled: progress(before + settled))
    fronts = [ranking.front() for ranking in rankings]
    kept = _taken(
        listing, [ids for ranking, front in zip(rankings, fronts, strict=True) for ids in _ids(ranking, fits.at, front)]
    )
    return {
        each.place: _found(wave, each, ranking, front, kept[KEPT * n : KEPT * (n + 1)], layers.count)
        for n, (each, ranking, front) in enumerate(zip(wave.searches, rankings, fronts, strict=True))
    }


KEPT: Final = 5
"""Lists of plans that are kept of a search."""


def _ids(ranking: Ranking, at: Array, front: Array) -> Iterator[tuple[Array, Array]]:
    """Configurations and placements of the best, the risky, the front, the one that likely fits, and that of energy."""
    likely, priced = ranking.likely, ranking.priced
    yield ranking.best.ids[:, 0], ranking.best.ids[:, 1]
    yield ranking.risky_best.ids[:, 0], ranking.risky_best.ids[:, 1]
    yield at[ranking.part][front], ranking.place[front]
    yield (likely[:1], likely[1:]) if likely is not None else (front[:0], front[:0])
    yield (priced.ids[:, 0], priced.ids[:, 1]) if priced is not None else (front[:0], front[:0])


def _taken(listing: Listing, ids: Sequence[tuple[Array, Array]]) -> list[Plans]:
    """Plans of some lists of configurations and placements."""
    every = _plans(listing, *(np.concatenate(one) for one in zip(*ids, strict=True)))
    none = every.take(slice(0))
    parts = _parts([len(configuration) for configuration, _ in ids])
    return [every.take(part) if part.start < part.stop else none for part in parts]


def _found(
    wave: _Wave, each: _Search, ranking: Ranking, front: Array, kept: Sequence[Plans], distinct_layers: int
) -> Found:
    """What was found for one of the tasks."""
    best, risky, of_front, likely, of_energy = kept
    priced = ranking.priced
    refused, lost = ({}, 0) if priced is None else (priced.refused, priced.lost)
    feasible = ranking.within - ranking.risky - lost
    return Found(
        task=each.task, candidates=each.listing.candidates, feasible=feasible, costed=ranking.costed,
        energy=None if priced is None else priced.front(of_energy),
        reasons=_reasons(wave, each, ranking.risky) | refused, best_s=ranking.best.values, best=best,
        risky_s=ranking.risky_best.values, risky=risky, front_s=ranking.time_s[front],
        front_bytes=ranking.peak[front], front=of_front,
        nearest=None if feasible or refused else _nearest(wave, each), distinct_layers=distinct_layers,
        likely_s=ranking.likely_s, likely=None if ranking.likely is None else likely,
    )  # fmt: skip


def _plans(listing: Listing, configuration: Array, placement: Array) -> Plans:
    return placed(listing.configurations.take(configuration), listing.placements.take(placement))


def _reasons(wave: _Wave, each: _Search, risky: int) -> dict[str, int]:
    whole, capacity = wave.table.whole[each.job], each.task.setting.machine.memory_bytes
    over = int(wave.listing.multiplicity[whole][wave.table.peak[whole] > capacity].sum())
    return each.listing.rejected | ({MEMORY: over} if over else {}) | ({RISK: risky} if risky else {})


def _nearest(wave: _Wave, each: _Search) -> Plans | None:
    """Configuration that lacks least memory."""
    whole, listing = wave.table.whole[each.job], wave.listing
    found = np.flatnonzero(listing.multiplicity[whole] > 0) + whole.start
    if not len(found):
        return None
    chosen = found[np.argmin(wave.table.peak[found])]
    start = listing.placement_start[listing.mesh_of[chosen]]
    return _plans(listing, np.array([chosen]), np.array([start]))
