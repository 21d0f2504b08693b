"""Costs every candidate of a space: enumerate, check memory, cost each distinct layer once, compose, rank.

Accumulators over blocks of candidates: the K best, and the front of time and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from steptime.estimate.energy import activity, flops_of
from steptime.estimate.evaluate import composed
from steptime.estimate.machine import Machine
from steptime.estimate.memory import peak_bytes
from steptime.estimate.memory_definitions import LIKELY_FITS, likely_fits
from steptime.estimate.result import PlannedJob, planned_job
from steptime.estimate.single import Setting
from steptime.estimate.step import Passes, Step
from steptime.num import Array, places_in_runs
from steptime.plan.job import Job
from steptime.plan.plans import FULL_RECOMPUTE, MEMORY, RISK, Plans, rows_of
from steptime.plan.space import Constraint, Listing, Space
from steptime.plan.strategies import Strategy
from steptime.search.layers import (
    SHAPE_COLUMNS,
    Codes,
    LayerTable,
    Shapes,
    as_float,
    distinct_rows,
    inner_columns,
    layer_table,
    shapes_of,
    take_sizes,
)
from steptime.search.objective import Objective


class Best:
    """The ``count`` smallest values seen, with their identities; earlier candidates win ties."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.values: Array = np.zeros(0)
        self.ids: Array = np.zeros((0, 2), dtype=np.int64)

    @property
    def threshold(self) -> float:
        """Values above it can't enter any more."""
        return float(self.values[-1]) if len(self.values) == self.count else np.inf

    def add(self, values: Array, configuration: Array, placement: Array) -> None:
        """Offers a block."""
        near = np.flatnonzero(values <= self.threshold)
        if len(near) > 4 * self.count:
            bound = np.partition(values[near], self.count - 1)[self.count - 1]
            near = near[values[near] <= bound]
        if not len(near):
            return
        merged = np.concatenate([self.values, values[near]])
        ids = np.concatenate([self.ids, np.stack([configuration[near], placement[near]], axis=1)])
        order = np.argsort(merged, kind="stable")[: self.count]
        self.values, self.ids = merged[order], ids[order]


def pareto_front(time_s: Array, memory_bytes: Array) -> Array:
    """Indices of the points that no other point beats in both; fastest first.

    >>> pareto_front(np.array([3.0, 1.0, 2.0]), np.array([1.0, 3.0, 3.0])).tolist()
    [1, 0]
    """
    order = np.lexsort((memory_bytes, time_s))
    memory = memory_bytes[order]
    least_before = np.concatenate([[np.inf], np.minimum.accumulate(memory)[:-1]])
    front: Array = order[memory < least_before]
    return front


def telling_points(time_s: Array, memory_bytes: Array, most: int) -> list[int]:
    r"""Indices of at most so many points of a front, two or more, that tell most of it; the first and the last stay.

    Of the points chosen the fastest that saves as much is taken for each that is left out; they are those for which

    $$\sum_i (\log m_{c(i)} - \log m_i)(\log t_{i+1} - \log t_i)$$

    is least, with $t$ = `time_s` (s) ascending, $m$ = `memory_bytes` (B) descending, and $c(i)$ the last point chosen
    up to $i$: the area between the stairs of the chosen points and those of all.

    >>> telling_points(np.array([4.50, 4.51, 4.8, 5.4, 8.9]), np.array([176.0, 52.0, 50.0, 46.0, 28.0]), 3)
    [0, 1, 4]
    """
    count = len(time_s)
    if count <= most:
        return list(range(count))
    width, height = np.diff(np.log(time_s)), np.log(memory_bytes)
    untold = np.full((count, count), np.inf)  # between one chosen point and the next
    for i in range(count - 1):
        untold[i, i + 1 :] = np.cumsum((height[i] - height[i:-1]) * width[i:])
    area, before = untold[0], []
    for _ in range(most - 2):
        through = area[:, None] + untold
        before.append(np.argmin(through, axis=0))
        area = np.min(through, axis=0)
    chosen = [count - 1]
    for step in reversed(before):
        chosen.append(int(step[chosen[-1]]))
    return [0, *reversed(chosen)]


BLOCK = 16384
"""Candidates that are composed at once: small enough for the cache."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyFront:
    """Plans of which no other beats time and energy of a step together; fastest first."""

    time_s: Array
    energy_J: Array
    plans: Plans


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
    reasons: dict[str, int]
    best_s: Array
    """What is least of the best, ascending: times of a step, or values of the objective."""
    best: Plans
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
    inner = distinct_rows([li.placements for li in listings], placed, inner_columns(job))
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

    Rows of experts depend on ``dp``; passes once a step or after each gathering on what is gathered, and how often.
    """
    unread = set()
    codes = [np.asarray(listing.configurations.recompute) for listing in listings]
    whole = all(((code == 0) | (code == FULL_RECOMPUTE)).all() for code in codes)
    passes = job.copied_parameters or job.precision.quantised_bytes is not None
    if whole and job.attention == "fused" and not passes:
        unread.add("recompute")
    if not job.model.tied_embeddings:
        unread.add("pp")
    if job.model.experts is None:
        unread.update(("ep", "etp"))
    more = {"dp"} if job.model.experts is not None else set()
    if passes:
        more |= {"dp", "zero", "shard", "recompute_every"}
    return (*(name for name in SHAPE_COLUMNS if name not in unread), *sorted(more - set(SHAPE_COLUMNS)))


def _listing(task: Task) -> Listing:
    setting, machine = task.setting, task.setting.machine
    return task.space.list(
        setting.job, task.strategy, machine.fast_domain, setting.rules, task.constraints,
        nearer_is_faster=machine.nearer_is_faster,
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


def _blocks(listing: Listing, fitting: Array) -> Iterator[tuple[Array, Array]]:
    """Positions among the fitting configurations, and placements, of about BLOCK candidates at a time."""
    counts = listing.multiplicity[fitting]
    ends = np.cumsum(counts)
    start = 0
    while start < len(fitting):
        before = ends[start - 1] if start else 0
        stop = max(int(np.searchsorted(ends, before + BLOCK, side="right")), start + 1)
        here = counts[start:stop]
        position = np.repeat(np.arange(start, stop), here)
        first = listing.placement_start[listing.mesh_of[fitting[start:stop]]]
        yield position, np.repeat(first, here) + places_in_runs(here)
        start = stop


def _ranked(each: _Listed, table: LayerTable, shapes: Shapes, top: int, progress: Callable[[int], None]) -> Found:
    """Composes and ranks the candidates of one task."""
    listing, setting = each.listing, each.task.setting
    machine, multiplicity = setting.machine, listing.multiplicity
    fitting = np.flatnonzero((each.peak <= machine.memory_bytes) & (multiplicity > 0))
    configurations = as_float(listing.configurations.take(fitting))
    sizes, placements = take_sizes(shapes.sizes, each.shape[fitting]), as_float(listing.placements)
    best, fastest, likely, risky = Best(top), _Fastest(len(fitting)), _Likely(), 0
    priced = None if each.task.objective is None else _Priced(each.task.objective, setting, configurations)
    done = listing.candidates - int(multiplicity[fitting].sum())
    for position, place in _blocks(listing, fitting):
        done += len(position)
        plans = _placed(configurations.take(position), placements.take(place))
        if setting.oom_limit is not None:
            safe = np.flatnonzero(_likely_fits(setting, plans, each.peak[fitting[position]], setting.oom_limit))
            risky += len(position) - len(safe)
            if not len(safe):
                continue
            position, place, plans = position[safe], place[safe], plans.take(safe)
        passes = table.take(each.shape[fitting[position]], each.inner[place])
        planned = planned_job(setting.method, each.task.strategy, setting.job, plans, take_sizes(sizes, position))
        _, step = composed(planned, machine, passes)
        times = np.broadcast_to(np.asarray(step.total_s), position.shape)
        if priced is None:
            best.add(times, fitting[position], place)
        else:
            priced.add(best, (planned, passes, step), times, (position, fitting[position], place))
        if setting.method.calibrated:
            likely.add(setting, plans, times, each.peak[fitting[position]], (fitting[position], place))
        fastest.add(position, place, times)
        progress(done)
    front = fastest.front(each.peak[fitting])
    refused, lost, energy = ({}, 0, None) if priced is None else priced.outcome(listing)
    feasible = int(multiplicity[fitting].sum()) - risky - lost
    return Found(
        task=each.task, candidates=listing.candidates, feasible=feasible, best_s=best.values, energy=energy,
        reasons=_reasons(each, multiplicity, risky) | refused, best=_plans(listing, best.ids[:, 0], best.ids[:, 1]),
        front_s=fastest.time_s[front], front_bytes=each.peak[fitting[front]],
        front=_plans(listing, fitting[front], fastest.place[front]),
        nearest=None if feasible or refused else _nearest(each, multiplicity), distinct_layers=table.count,
        likely_s=likely.time_s, likely=None if likely.at is None else _plans(listing, *likely.at),
    )  # fmt: skip


def _likely_fits(setting: Setting, plans: Plans, peak: Array, chance: float) -> Array:
    machine, framework = setting.machine, setting.job.memory.name
    fits: Array = likely_fits(peak, plans, framework, machine.memory_bytes, chance, is_host=machine.is_host)
    return fits


class _Likely:
    """The fastest candidate seen that likely does not run out of memory."""

    def __init__(self) -> None:
        self.time_s = np.inf
        self.at: tuple[Array, Array] | None = None

    def add(self, setting: Setting, plans: Plans, times: Array, peak: Array, at: tuple[Array, Array]) -> None:
        """Offers a block; of those that are slower than what is known nothing is computed."""
        near = np.flatnonzero(times < self.time_s)
        if not len(near):
            return
        fits = _likely_fits(setting, plans.take(near), peak[near], LIKELY_FITS)
        near = near[fits]
        if len(near):
            first = near[np.argmin(times[near])]
            self.time_s, self.at = float(times[first]), (at[0][[first]], at[1][[first]])


class _Priced:
    """Time and energy of every candidate: those within the bounds are ranked, and the front of all is kept."""

    def __init__(self, objective: Objective, setting: Setting, configurations: Plans) -> None:
        self.objective, self.setting = objective, setting
        columns = (configurations.recompute, configurations.recompute_every)
        rows = (rows_of(configurations),)
        self.flops = flops_of(setting.job, *(np.broadcast_to(np.asarray(each), rows) for each in columns))
        self.refused: dict[str, int] = {}
        self.lost = 0
        self.time_s = self.energy_J = np.zeros(0)
        self.ids: Array = np.zeros((0, 2), dtype=np.int64)

    def add(self, best: Best, made: tuple[PlannedJob, Passes, Step], times: Array, at: tuple[Array, ...]) -> None:
        """Offers a block: its job, passes and step, times, and places of its configurations and placements."""
        position, configuration, place = at
        planned, passes, step = made
        does = activity(planned, self.setting.machine, passes, step, self.flops[position])
        wanted, devices = self.objective, self.setting.job.gpus
        power = np.broadcast_to(np.asarray(does.power_W(wanted.idle_W, wanted.peak_W)), times.shape)
        energy = wanted.energy_J(times, power, devices)
        over = np.zeros(times.shape, dtype=bool)
        for name, out in wanted.refused(times, energy).items():
            if count := int(out.sum()):
                self.refused[name] = self.refused.get(name, 0) + count
            over |= out
        self.lost += int(over.sum())
        kept = np.flatnonzero(~over)
        best.add(np.asarray(wanted.mix.of(times[kept], energy[kept])), configuration[kept], place[kept])
        self._to_front(times, energy, np.stack([configuration, place], axis=1))

    def _to_front(self, times: Array, energy: Array, ids: Array) -> None:
        near = pareto_front(times, energy)
        merged = np.concatenate([self.time_s, times[near]]), np.concatenate([self.energy_J, energy[near]])
        kept = pareto_front(*merged)
        self.time_s, self.energy_J = merged[0][kept], merged[1][kept]
        self.ids = np.concatenate([self.ids, ids[near]])[kept]

    def outcome(self, listing: Listing) -> tuple[dict[str, int], int, EnergyFront | None]:
        """Reasons with their counts, candidates that are refused, and the front of all that fit in memory."""
        plans = _plans(listing, self.ids[:, 0], self.ids[:, 1])
        return self.refused, self.lost, EnergyFront(time_s=self.time_s, energy_J=self.energy_J, plans=plans)


class _Fastest:
    """The fastest placement of every configuration; infinite time where none was offered."""

    def __init__(self, configurations: int) -> None:
        self.time_s = np.full(configurations, np.inf)
        self.place = np.zeros(configurations, dtype=np.int64)

    def add(self, position: Array, place: Array, times: Array) -> None:
        """Offers all candidates of some configurations: their positions in ascending order, placements, times."""
        starts = np.flatnonzero(np.diff(position, prepend=-1))
        low = np.minimum.reduceat(times, starts)
        self.time_s[position[starts]] = low
        self.place[position[starts]] = _first_equal(times, starts, low, place)

    def front(self, peak: Array) -> Array:
        """Positions of the configurations that no other beats in both time and memory."""
        kept = np.flatnonzero(np.isfinite(self.time_s))
        front: Array = kept[pareto_front(self.time_s[kept], peak[kept])]
        return front


def _first_equal(times: Array, starts: Array, low: Array, place: Array) -> Array:
    """Placement at which each run of candidates has its least time."""
    lengths = np.diff(np.append(starts, len(times)))
    hits = np.flatnonzero(times == np.repeat(low, lengths))
    run = np.repeat(np.arange(len(starts)), lengths)[hits]
    _, first = np.unique(run, return_index=True)
    at: Array = place[hits[first]]
    return at


def _placed(configurations: Plans, placements: Plans) -> Plans:
    columns = {name: value for name, value in placements.columns().items() if name.startswith("in_")}
    return configurations.with_columns(columns)


def _plans(listing: Listing, configuration: Array, placement: Array) -> Plans:
    return _placed(listing.configurations.take(configuration), listing.placements.take(placement))


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
