"""Ranks the candidates of one search: bounds first, then only what a bound does not rule out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from steptime.dataclass import dataclass
from steptime.estimate.evaluate import composed
from steptime.estimate.memory_definitions import LIKELY_FITS, likely_fits, may_fit
from steptime.estimate.result import planned_job
from steptime.estimate.single import Setting
from steptime.estimate.sizes import Sizes
from steptime.num import Array, places_in_runs
from steptime.plan.plans import Plans
from steptime.plan.space import Listing
from steptime.plan.strategies import Strategy
from steptime.search.accumulators import Best, pareto_front
from steptime.search.bounds import least_step_s
from steptime.search.layers import LayerTable, take_sizes
from steptime.search.priced import Made, Priced

ROUND, BLOCK = 1 << 11, 1 << 14
"""Candidates that are costed before bounds are compared again, at first and at most: few enough for the cache."""

RISKY_SHOWN = 3
"""Plans too likely to run out of memory to be first that are shown where they would be faster."""

Done = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """The configurations of one search that fit into memory, one row each, and what costs their candidates."""

    setting: Setting
    strategy: Strategy
    listing: Listing
    at: Array
    """Row of each in the listing."""
    configurations: Plans
    sizes: Sizes
    peak: Array
    shape: Array
    """Row of each in the table of layers, and column of each placement of the listing."""
    inner: Array
    placements: Plans
    table: LayerTable

    @property
    def counts(self) -> Array:
        """Placements of each."""
        return self.listing.multiplicity[self.at]

    def candidates(self, chosen: Array) -> tuple[Array, Array]:
        """Configuration and placement of all candidates of some configurations, in their order."""
        here = self.counts[chosen]
        first = self.listing.placement_start[self.listing.mesh_of[self.at[chosen]]]
        return np.repeat(chosen, here), np.repeat(first, here) + places_in_runs(here)

    def plans(self, position: Array, place: Array) -> Plans:
        """Plans of some candidates."""
        return placed(self.configurations.take(position), self.placements.take(place))

    def least_s(self) -> Array:
        """Time that no placement of each configuration is below."""
        planned = planned_job(self.setting.method, self.strategy, self.setting.job, self.configurations, self.sizes)
        return least_step_s(planned, self.setting.machine, self.table, self.shape)

    def made(self, plans: Plans, position: Array, place: Array) -> Made:
        """Job, passes and step of each candidate."""
        passes = self.table.take(self.shape[position], self.inner[place])
        sizes = take_sizes(self.sizes, position)
        planned = planned_job(self.setting.method, self.strategy, self.setting.job, plans, sizes)
        _, step = composed(planned, self.setting.machine, passes)
        return planned, passes, step

    def fits(self, plans: Plans, position: Array, chance: float) -> Array:
        """Whether each candidate runs out of memory with that chance at most."""
        machine, framework = self.setting.machine, self.setting.job.memory.name
        peak = self.peak[position]
        fits: Array = likely_fits(peak, plans, framework, machine.memory_bytes, chance, is_host=machine.is_host)
        return np.broadcast_to(fits, position.shape)

    def may_fit(self, chance: float) -> Array:
        """Whether some placement of each configuration may run out of memory with that chance at most."""
        machine = self.setting.machine
        name, capacity = self.setting.job.memory.name, machine.memory_bytes
        return np.asarray(may_fit(self.peak, name, capacity, chance, is_host=machine.is_host))


class Ranking:
    """The best candidates of a search, its front, and the fastest that likely fits, as far as they are costed.

    Exact: a configuration is left out only where even its lower bound is above what it would have to beat; with an
    objective none is.
    """

    def __init__(self, fitting: Fitting, top: int, priced: Priced | None = None) -> None:
        self._of, self._priced = fitting, priced
        rows = len(fitting.at)
        self.best = Best(top)
        """Of those that run out of memory with the chance at most that a first plan may have; all without a limit."""
        self.risky_best = Best(RISKY_SHOWN)
        """Of all others."""
        self.likely_s: float = np.inf
        self.likely: Array | None = None
        """Position and placement of the fastest candidate that likely fits, and its time."""
        self.time_s, self.place = np.full(rows, np.inf), np.zeros(rows, dtype=np.int64)
        """Time and placement of the fastest candidate of each configuration; infinite where none was costed."""
        self.costed = self.risky = 0

    def run(self, done: Done) -> None:
        """Costs what has to be costed; ``done`` is told the number of candidates that are settled."""
        of = self._of
        if not len(of.at):
            return
        limit = of.setting.oom_limit
        if limit is not None:
            self._count_risky(limit)
        counts = of.counts
        least_s = of.least_s() if self._priced is None else np.zeros(len(of.at))
        likely = of.may_fit(LIKELY_FITS) if of.setting.method.calibrated else np.zeros(len(of.at), dtype=bool)
        first = None if of.setting.first_limit is None else of.may_fit(of.setting.first_limit)
        unknown, most = np.ones(len(of.at), dtype=bool), ROUND
        chosen = np.concatenate(
            (_first(np.argsort(least_s, kind="stable"), counts, ROUND), pareto_front(least_s, of.peak))
        )
        chosen = np.unique(chosen, return_index=True)[0]  # with an index, as without one it loads numpy.ma
        while len(chosen):
            for start in range(0, len(chosen), BLOCK):
                self._cost(chosen[start : start + BLOCK], limit)
            unknown[chosen] = False
            needed = unknown & (least_s <= np.maximum(self._to_beat(first), np.where(likely, self.likely_s, -np.inf)))
            done(int(counts[~needed].sum()))
            open_ = np.flatnonzero(needed)
            most = min(2 * most, BLOCK)
            chosen = np.sort(_first(open_[np.argsort(least_s[open_], kind="stable")], counts, most))

    def front(self) -> Array:
        """Positions of the configurations that no other beats in both time and memory."""
        kept = np.flatnonzero(np.isfinite(self.time_s))
        front: Array = kept[pareto_front(self.time_s[kept], self._of.peak[kept])]
        return front

    def _to_beat(self, first: Array | None) -> Array:
        """Time above which a configuration is neither among the best, nor shown next to them, nor on the front.

        Args:
            first: whether a placement of each may be put first; None: any may.
        """
        order = np.argsort(self._of.peak, kind="stable")
        fastest = np.minimum.accumulate(self.time_s[order])
        peak = self._of.peak[order]
        within = fastest[np.searchsorted(peak, self._of.peak, side="right") - 1]
        best: Array | float = self.best.threshold
        if first is not None:
            fastest_s = float(self.best.values[0]) if len(self.best.values) else np.inf
            best = np.maximum(np.where(first, best, -np.inf), min(self.risky_best.threshold, fastest_s))
        beaten: Array = np.maximum(within, best)
        return beaten

    def _count_risky(self, limit: float) -> None:
        for start in range(0, len(self._of.at), BLOCK):
            position, place = self._of.candidates(np.arange(start, min(start + BLOCK, len(self._of.at))))
            self.risky += int((~self._of.fits(self._of.plans(position, place), position, limit)).sum())

    def _cost(self, chosen: Array, limit: float | None) -> None:
        """Costs all candidates of some configurations, in ascending order."""
        of = self._of
        position, place = of.candidates(chosen)
        plans = of.plans(position, place)
        self.costed += len(position)
        if limit is not None:
            safe = np.flatnonzero(of.fits(plans, position, limit))
            if not len(safe):
                return
            position, place, plans = position[safe], place[safe], plans.take(safe)
        made = of.made(plans, position, place)
        times = np.broadcast_to(np.asarray(made[2].total_s), position.shape)
        values, kept = times, np.arange(len(times))
        if self._priced is not None:
            values, kept = self._priced.values(made, times, (position, of.at[position], place))
        self._offer(plans.take(kept), values, position[kept], place[kept])
        if of.setting.method.calibrated:
            self._offer_likely(plans, times, position, place)
        starts = np.flatnonzero(np.diff(position, prepend=-1))
        low = np.minimum.reduceat(times, starts)
        self.time_s[position[starts]] = low
        self.place[position[starts]] = _first_equal(times, starts, low, place)

    def _offer(self, plans: Plans, values: Array, position: Array, place: Array) -> None:
        """Offers candidates to the best, or by their chance of running out of memory to those shown next to them."""
        limit, of = self._of.setting.first_limit, self._of
        if limit is None:
            return self.best.add(values, of.at[position], place)
        near = np.flatnonzero(values <= max(self.best.threshold, self.risky_best.threshold))
        if not len(near):
            return None
        safe = of.fits(plans.take(near), position[near], limit)
        for best, chosen in ((self.best, near[safe]), (self.risky_best, near[~safe])):
            best.add(values[chosen], of.at[position[chosen]], place[chosen])
        return None

    def _offer_likely(self, plans: Plans, times: Array, position: Array, place: Array) -> None:
        """Offers candidates; of those that are slower than what is known nothing is computed."""
        near = np.flatnonzero(times <= self.likely_s)
        near = near[self._of.fits(plans.take(near), position[near], LIKELY_FITS)] if len(near) else near
        if not len(near):
            return
        first = near[np.lexsort((place[near], position[near], times[near]))[0]]
        at = np.array([position[first], place[first]])
        if times[first] < self.likely_s or self.likely is None or tuple(at) < tuple(self.likely):
            self.likely_s, self.likely = float(times[first]), at


def _first(ordered: Array, counts: Array, most: int) -> Array:
    """The first of some configurations, with `most` candidates together, or one."""
    return ordered[: max(int(np.searchsorted(np.cumsum(counts[ordered]), most, side="right")), 1)]


def _first_equal(times: Array, starts: Array, low: Array, place: Array) -> Array:
    """Placement at which each run of candidates has its least time."""
    lengths = np.diff(np.append(starts, len(times)))
    hits = np.flatnonzero(times == np.repeat(low, lengths))
    run = np.repeat(np.arange(len(starts)), lengths)[hits]
    _, first = np.unique(run, return_index=True)
    at: Array = place[hits[first]]
    return at


def placed(configurations: Plans, placements: Plans) -> Plans:
    """Configurations, each under one placement."""
    columns = {name: value for name, value in placements.columns().items() if name.startswith(("in_", "at_"))}
    return configurations.with_columns(columns)
