"""Ranks the candidates of a search: bounds first, then costs of those that their bound does not rule out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import numpy as np

from steptime.estimate.machine import Machine
from steptime.estimate.memory_definitions import LIKELY_FITS, likely_fits, may_fit
from steptime.estimate.result import PlannedJob
from steptime.estimate.single import Setting
from steptime.estimate.step import compose
from steptime.estimate.step_inputs import StepInputs, linked_inputs, messages_of
from steptime.estimate.traffic import parameter_traffic
from steptime.num import Array, distinct, places_in_runs
from steptime.plan.plans import Plans
from steptime.plan.space import MESH_COLUMNS, Listing
from steptime.records import rows
from steptime.search.accumulators import Best, pareto_front
from steptime.search.bounds import least_step_s
from steptime.search.layers import Codes, LayerTable, distinct_rows
from steptime.search.priced import Made, Priced

ROUND, BLOCK = 1 << 11, 1 << 14
"""Candidates costed between two comparisons of bounds, at first and at most: few enough for the cache."""

RISKY_SHOWN = 3
"""Number of shown plans that are faster than the first but too likely to run out of memory."""

Sent: TypeAlias = tuple[dict[str, Any], dict[str, Any]]
T = TypeVar("T")


def kinds_of(plans: Plans, count: int, regardless: tuple[str, ...]) -> Codes:
    """Groups of ``count`` configurations with equal columns, apart from degrees and the columns ``regardless``."""
    left = (*MESH_COLUMNS, *regardless)
    columns = tuple(
        name for name, column in plans.columns().items()
        if isinstance(column, np.ndarray) and name not in left and name[:3] not in ("in_", "at_")
    )  # fmt: skip
    return distinct_rows([plans], [count], columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """The configurations of a job that fit into memory, one row each, on fast domains of any size."""

    at: Array
    """Row of each configuration in the listing."""
    planned: PlannedJob
    unlinked: StepInputs
    """Inputs of the step of each configuration without communication."""
    every: Array
    """Peak memory of all configurations of the listing."""
    peak: Array
    """Peak memory of the configurations that fit."""
    shape: Array
    """Row of each configuration in the table of layers."""
    messages: Codes
    """Groups of configurations of a mesh with the same messages between stages."""
    parameters: Codes
    """Groups of configurations of a mesh with the same traffic of parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """Configurations of a search that fit, with everything needed to cost their candidates."""

    setting: Setting
    configured: Configured
    listing: Listing
    inner: Array
    """Column of each placement of the listing in the table of layers."""
    placements: Plans
    table: LayerTable
    counts: Array
    """Number of placements of each configuration."""

    def candidates(self, chosen: Array) -> tuple[Array, Array]:
        """Configuration and placement of all candidates of some configurations, in their order."""
        here = self.counts[chosen]
        first = self.listing.placement_start[self.listing.mesh_of[self.configured.at[chosen]]]
        return np.repeat(chosen, here), np.repeat(first, here) + places_in_runs(here)

    def plans(self, position: Array, place: Array) -> Plans:
        """Plans of some candidates."""
        return placed(self.configured.planned.plans.take(position), self.placements.take(place))

    def planned(self, position: Array, place: Array) -> PlannedJob:
        """Job under the plans of some candidates."""
        return self.configured.planned.take(position, self.plans(position, place))

    def sent(self, position: Array, place: Array) -> Callable[[slice | Array], Sent]:
        """Function of a slice of some candidates: their traffic outside the passes, each kind costed once."""

        def costed(kinds: Codes, of: Callable[[PlannedJob, Machine], T]) -> tuple[T, Array]:
            code = place * kinds.count + kinds.inverse[position]  # the placement says which mesh it is of
            one, number = distinct([code])
            return of(self.planned(position[one], place[one]), self.setting.machine), number

        messages, of_messages = costed(self.configured.messages, messages_of)
        parameters, of_parameters = costed(self.configured.parameters, parameter_traffic)
        return lambda at: (rows(messages, of_messages[at]), rows(parameters, of_parameters[at]))

    def costed(self, position: Array, place: Array, sent: Sent) -> tuple[Array, Array, Array, Callable[[], Made]]:
        """Candidates within the limit on running out of memory, their times, and a function that prices them."""
        plans, limit = self.plans(position, place), self.setting.oom_limit
        if limit is not None:
            safe = np.flatnonzero(self.fits(plans, position, limit))
            position, place, plans = position[safe], place[safe], plans.take(safe)
            sent = rows(sent[0], safe), rows(sent[1], safe)
        method, job, machine = self.setting.method, self.setting.job, self.setting.machine
        passes = self.table.take(self.configured.shape[position], self.inner[place])
        unlinked = rows(self.configured.unlinked, position)
        step = compose(linked_inputs(unlinked, method, job, plans, machine, *sent), passes, job.framework)
        times = np.broadcast_to(np.asarray(step.total_s), position.shape)
        return position, place, times, lambda: (self.planned(position, place), passes, step)

    def fits(self, plans: Plans, position: Array, chance: float) -> Array:
        """True for each candidate whose chance of running out of memory is at most ``chance``."""
        machine, framework = self.setting.machine, self.setting.job.memory.name
        peak = self.configured.peak[position]
        fits: Array = likely_fits(peak, plans, framework, machine.memory_bytes, chance, is_host=machine.is_host)
        return np.broadcast_to(fits, position.shape)

    def may_fit(self, chance: float) -> Array:
        """True for each configuration of which some placement may have at most this chance of running out of memory."""
        machine = self.setting.machine
        name, capacity = self.setting.job.memory.name, machine.memory_bytes
        return np.asarray(may_fit(self.configured.peak, name, capacity, chance, is_host=machine.is_host))


class Ranking:
    """The best candidates of a search, its front, and the fastest candidate that likely fits.

    Exact: a configuration is left out only if its lower bound is above the times to beat; with an objective none is.

    Args:
        of: the configurations that fit.
        top: number of best candidates to keep.
        priced: prices of candidates, for a search with an objective.
    """

    def __init__(self, of: Fitting, top: int, priced: Priced | None = None) -> None:
        self.of, self.priced, self.peak, self._counts = of, priced, of.configured.peak, of.counts
        count = len(self.peak)
        self.best = Best(top)
        """Best candidates within the limit on the chance of running out of memory; of all without a limit."""
        self.risky_best = Best(RISKY_SHOWN)
        """Best candidates beyond the limit."""
        self.likely_s: float = np.inf
        self.likely: Array | None = None
        """Configuration and placement of the fastest candidate that likely fits."""
        self.time_s, self.place = np.full(count, np.inf), np.zeros(count, dtype=np.int64)
        """Time and placement of the fastest candidate of each configuration; infinite if none was costed."""
        self.within = int(self._counts.sum())
        """Number of candidates that fit."""
        self.costed = self.risky = self.settled = 0

    def run(self) -> Iterator[int]:
        """Costs candidates round by round, those with the smallest bounds first, until no other can be kept.

        Yields:
            Number of settled candidates, after each block.
        """
        of, setting, counts = self.of, self.of.setting, self._counts
        if not self.within:
            return
        configured, shape = of.configured, of.configured.shape
        # Per configuration: lower bound of the time, whether some placement may likely fit, and whether one may rank
        # first. Only time has bounds; the memory of a reproduced paper has no chance of running out.
        least_s, likely = np.zeros(len(shape)), np.zeros(len(shape), dtype=bool)
        if self.priced is None:
            least_s = least_step_s(configured.unlinked, setting.job.framework, of.table, shape)
        if setting.method.calibrated:
            likely = of.may_fit(LIKELY_FITS)
        first = None if setting.first_limit is None else of.may_fit(setting.first_limit)
        if setting.oom_limit is not None:
            self._count_risky(setting.oom_limit)
        unknown, most = counts > 0, ROUND
        chosen = np.flatnonzero(unknown)
        if least_s.any():
            fastest = chosen[np.argsort(least_s[chosen], kind="stable")]
            chosen = np.concatenate((self._first(fastest, ROUND), _front_of(chosen, least_s, self.peak)))
            chosen = np.unique(chosen, return_index=True)[0]  # with an index, as without one it loads numpy.ma
        while len(chosen):
            yield self.settled
            yield from self._cost(chosen)
            unknown[chosen] = False
            needed = unknown & (least_s <= np.maximum(self._to_beat(first), np.where(likely, self.likely_s, -np.inf)))
            self.settled = int(counts[~needed].sum())
            open_ = np.flatnonzero(needed)
            most = min(2 * most, BLOCK)
            chosen = np.sort(self._first(open_[np.argsort(least_s[open_], kind="stable")], most))
        yield self.settled

    def _cost(self, chosen: Array) -> Iterator[int]:
        """Costs all candidates of some configurations, in ascending order."""
        position, place = self.of.candidates(chosen)
        sent, lasts = self.of.sent(position, place), np.cumsum(self._counts[chosen])
        stop = 0
        while stop < len(position):
            start, at = stop, int(np.searchsorted(lasts, stop + BLOCK, side="right"))
            stop = int(lasts[max(at - 1, int(np.searchsorted(lasts, stop, side="right")))])
            here = slice(start, stop)
            self.costed += stop - start
            costed = self.of.costed(position[here], place[here], sent(here))
            if len(costed[0]):
                self._take_in(*costed)
            yield self.settled + stop

    def front(self) -> Array:
        """Configurations that no other beats in both time and memory."""
        return _front_of(np.flatnonzero(np.isfinite(self.time_s)), self.time_s, self.peak)

    def _first(self, ordered: Array, most: int) -> Array:
        """The first of some configurations, with at most ``most`` candidates together, but at least one."""
        return ordered[: max(int(np.searchsorted(np.cumsum(self._counts[ordered]), most, side="right")), 1)]

    @cached_property
    def _by_memory(self) -> tuple[Array, Array]:
        """Configurations by memory, and for each the index of the last one with no more memory."""
        order = np.argsort(self.peak, kind="stable")
        return order, np.searchsorted(self.peak[order], self.peak, side="right") - 1

    def _to_beat(self, first: Array | None) -> Array:
        """Time above which a configuration is neither among the best, nor among the shown risky ones, nor on the front.

        Args:
            first: True if some placement of the configuration may rank first; None: all may.
        """
        order, last = self._by_memory
        within = np.minimum.accumulate(self.time_s[order])[last]
        best: Array | float = self.best.threshold
        if first is not None:
            fastest_s = float(self.best.values[0]) if len(self.best.values) else np.inf
            best = np.maximum(np.where(first, best, -np.inf), min(self.risky_best.threshold, fastest_s))
        beaten: Array = np.maximum(within, best)
        return beaten

    def _count_risky(self, limit: float) -> None:
        for start in range(0, len(self.peak), BLOCK):
            position, place = self.of.candidates(np.arange(start, min(start + BLOCK, len(self.peak))))
            self.risky += int((~self.of.fits(self.of.plans(position, place), position, limit)).sum())

    def _take_in(self, position: Array, place: Array, times: Array, made: Callable[[], Made]) -> None:
        """Updates all accumulators with costed candidates within the limit, ascending by configuration.

        ``made``: function that prices them.
        """
        values, at = times, (position, place)
        if self.priced is not None:
            values, kept = self.priced.values(made(), times, (position, self.of.configured.at[position], place))
            at = position[kept], place[kept]
        self._offer(values, *at)
        if self.of.setting.method.calibrated:
            self._offer_likely(times, position, place)
        starts = np.flatnonzero(np.diff(position, prepend=-1))
        low = np.minimum.reduceat(times, starts)
        self.time_s[position[starts]] = low
        self.place[position[starts]] = _first_equal(times, starts, low, place)

    def _fits(self, position: Array, place: Array, chance: float) -> Array:
        return self.of.fits(self.of.plans(position, place), position, chance)

    def _offer(self, values: Array, position: Array, place: Array) -> None:
        """Offers candidates to the best, or to the risky ones if their chance of running out of memory is too large."""
        limit, of = self.of.setting.first_limit, self.of
        if limit is None:
            return self.best.add(values, of.configured.at[position], place)
        near = np.flatnonzero(values <= max(self.best.threshold, self.risky_best.threshold))
        if not len(near):
            return None
        safe = self._fits(position[near], place[near], limit)
        for best, chosen in ((self.best, near[safe]), (self.risky_best, near[~safe])):
            best.add(values[chosen], of.configured.at[position[chosen]], place[chosen])
        return None

    def _offer_likely(self, times: Array, position: Array, place: Array) -> None:
        """Offers candidates as likely to fit; slower ones than the known fastest are skipped without a computation."""
        near = np.flatnonzero(times <= self.likely_s)
        near = near[self._fits(position[near], place[near], LIKELY_FITS)] if len(near) else near
        if not len(near):
            return
        first = near[np.lexsort((place[near], position[near], times[near]))[0]]
        at = np.array([self.of.configured.at[position[first]], place[first]])
        if times[first] < self.likely_s or self.likely is None or tuple(at) < tuple(self.likely):
            self.likely_s, self.likely = float(times[first]), at


def _front_of(some: Array, time_s: Array, peak: Array) -> Array:
    """The configurations among some that no other of them beats in both time and memory."""
    front: Array = some[pareto_front(time_s[some], peak[some])]
    return front


def _first_equal(times: Array, starts: Array, low: Array, place: Array) -> Array:
    """First placement with the smallest time in each run of candidates."""
    lengths = np.diff(np.append(starts, len(times)))
    hits = np.flatnonzero(times == np.repeat(low, lengths))
    run = np.repeat(np.arange(len(starts)), lengths)[hits]
    _, first = np.unique(run, return_index=True)
    at: Array = place[hits[first]]
    return at


def placed(configurations: Plans, placements: Plans) -> Plans:
    """Plans of configurations, each under one placement."""
    columns = {name: value for name, value in placements.columns().items() if name.startswith(("in_", "at_"))}
    return configurations.with_columns(columns)
