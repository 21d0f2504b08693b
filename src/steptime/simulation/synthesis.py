"""Search for a better schedule than the named ones, for given times, messages and memory; a bound ends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from time import monotonic
from typing import Final

import numpy as np

from steptime.cost.pipeline import zero_bubble_in_flight, zero_bubble_s
from steptime.errors import UserError
from steptime.num import Array, Num
from steptime.schedule.actions import ActionTable
from steptime.schedule.schedules import (
    SCHEDULES,
    WHOLE_SEQUENCES,
    Pipeline,
    Rule,
    Schedule,
    Times,
)
from steptime.simulation.annealing import annealed
from steptime.simulation.least_span import least_span_s
from steptime.simulation.shop import LEAST, PLACEMENTS, Habits, Orders, Shop, listed, shop_of
from steptime.simulation.simulate import Durations, spread

NAME: Final = "searched"
EFFORT: Final = 4_000_000
"""Default number of passes that a search times over all orders: some seconds."""
QUICK: Final = 200_000
"""Number of passes that the schedule in the registry times: some tenths of a second."""
STARTS: Final = 6
"""Orders of each placement in the first round of improvement."""
LISTED: Final = "list scheduling"
"""Origin of an order made by a priority rule."""
FIRST_ROUNDS: Final = 256
"""Changes of each order in the first round; in each later round the better half of the orders gets twice as many."""
HABITS: Final = tuple(
    Habits(lead, backward, deep, patience)
    for lead, patience, backward, deep in product(
        (0.75, 1.0, 0.5, 1.5, 2.0, 99.0), (0.5, 0.0, 1.0), (False, True), (True, False)
    )
)

Progress = Callable[[int, float, float], None]


@dataclass(frozen=True, slots=True)
class ProvedOptimal:
    """The span is the bound."""

    gap: float

    def __str__(self) -> str:
        return "proved: no schedule of the kind is faster"


@dataclass(frozen=True, slots=True)
class Exhausted:
    """The search has timed all passes that it may time."""

    passes: int

    def __str__(self) -> str:
        return f"exhausted: {self.passes:,} passes timed"


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """The given time is over."""

    seconds: float

    def __str__(self) -> str:
        return f"time limit: {self.seconds:g} s"


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The user stopped the search."""

    passes: int

    def __str__(self) -> str:
        return f"interrupted: {self.passes:,} passes timed"


Stop = ProvedOptimal | Exhausted | TimeLimit | Interrupted


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthesis:
    """The best schedule that was found."""

    table: ActionTable
    placement: str
    """Name of the :class:`~steptime.simulation.shop.Placement` of stages on ranks."""
    span_s: float
    """Longest time of a rank from the start of its first pass to the end of its last (s):
    ``rank_span_s.max()`` of the simulated table, the time from one step to the next without a barrier."""
    held: tuple[float, ...]
    """Largest number of activations of each rank, in micro-batches of a p-th part of the model."""
    bound_s: float
    """Lower bound on the span with the same number of chunks and memory limits
    (:func:`~steptime.simulation.least_span.least_span_s`; the least over the placements)."""
    began: str
    """Name of the schedule that the search started from, or :data:`LISTED`."""
    stop: Stop

    @property
    def gap(self) -> float:
        """Share of the span by which the bound is shorter; the optimal schedule is faster by this share at most."""
        return 1 - self.bound_s / self.span_s


@dataclass(slots=True)
class _State:
    """Orders that are being improved."""

    shop: Shop
    orders: Orders
    span_s: float
    began: str


def synthesised(
    pipeline: Pipeline,
    durations: Durations | None = None,
    *,
    memory_limit: Num | None = None,
    deferred: float = 1.0,
    effort: float = EFFORT,
    seconds: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Synthesis:
    """Searches for the schedule whose steps follow each other fastest, under a memory limit.

    It starts from every named synchronous schedule of one copy of the model that serves the pipeline and fits, and from
    orders by list scheduling, and improves the best of them by simulated annealing of the passes on the longest path.
    So it is never slower than a named one that fits. Whole backward passes become their two parts.
    The same arguments find the same schedule, except under a time limit.

    Reference: Qi et al., arXiv 2401.10241, section 3, whose search is the schedules zb-1p and zb-2p.

    Args:
        pipeline: ranks, chunks (1 or 2) and micro-batches.
        durations: seconds of passes, by stage or for all stages, and of messages; a whole backward pass takes as long
            as its two parts. None: `pipeline.times`, with an equal share of the model on each stage.
        memory_limit: micro-batches whose activations, of a p-th part of the model, fit: a number, or an array by rank;
            None: the pipeline's limit.
        deferred: share of the activations that the weight-gradient pass needs; the rest is freed after the
            input-gradient pass.
        effort: number of passes to time, over all orders.
        seconds: stop after this time, whatever the effort; None: no time limit.
        seed: seed of the changes.
        progress: called with the passes timed, the best span and the bound (s).

    Raises:
        UserError: the pipeline is not served, a time is invalid, or a memory limit is below one micro-batch.

    >>> found = synthesised(Pipeline(ranks=2, micro_batches=4, memory_limit=3))
    >>> found.span_s, found.bound_s, str(found.stop)     # 4 micro-batches of 3 seconds: no bubble
    (12.0, 12.0, 'proved: no schedule of the kind is faster')
    >>> print(*found.table.of_rank(1))
    1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3
    """
    SCHEDULES[NAME].check(replace(pipeline, memory_limit=inf, times=Times()))
    limits = limits_of(pipeline.memory_limit if memory_limit is None else memory_limit, pipeline.ranks)
    if not 0 <= deferred <= 1:
        raise UserError(f"deferred is no share: {deferred}", hint="0 to 1, of the activations of a micro-batch")
    if seconds is not None and not seconds > 0:
        raise UserError(f"a search of {seconds:g} seconds", hint="above 0")
    shops = _shops(pipeline, durations or durations_of(pipeline), limits, deferred)
    return _Search(pipeline, shops, effort if seconds is None else inf, seconds, seed, progress).found()


class _Search:
    """State of the search, with the passes timed so far."""

    def __init__(
        self,
        pipeline: Pipeline,
        shops: Sequence[Shop],
        effort: float,
        seconds: float | None,
        seed: int,
        progress: Progress | None,
    ) -> None:
        self.pipeline, self.effort, self.seconds, self.seed = pipeline, effort, seconds, seed
        self.until = inf if seconds is None else monotonic() + seconds
        self.progress = progress or (lambda *_: None)
        self.bounds = [least_span_s(shop) for shop in shops]
        self.shops, self.bound_s = shops, min(self.bounds)
        self.passes, self.best = 0, list[_State]()
        self.in_time = True

    def found(self) -> Synthesis:
        """The best schedule, and why the search stopped."""
        stop: Stop | None = None
        try:
            self.improve(self.starts())
        except KeyboardInterrupt:
            if not self.best:
                raise
            stop = Interrupted(self.passes)
        best = self.best[0]
        if self.proved(best.span_s):
            stop = ProvedOptimal(max(0.0, 1 - self.bound_s / best.span_s))
        elif stop is None:
            stop = Exhausted(self.passes) if self.in_time or self.seconds is None else TimeLimit(self.seconds)
        return Synthesis(
            table=best.shop.table(best.orders),
            placement=best.shop.placement.name,
            span_s=best.span_s,
            held=best.shop.held(best.orders),
            bound_s=min(self.bound_s, best.span_s),
            began=best.began,
            stop=stop,
        )

    def proved(self, span_s: float) -> bool:
        """True if the bound proves the span optimal."""
        return span_s <= self.bound_s * (1 + LEAST)

    def goes_on(self) -> bool:
        """True while the search may find a faster schedule and has effort and time left."""
        self.in_time = monotonic() < self.until
        return self.in_time and self.passes < self.effort and not self.proved(self.best[0].span_s)

    def enter(self, state: _State) -> None:
        """Count a timed order; among equal spans the one that holds less comes first."""
        self.passes += len(state.shop.takes)
        if not self.best or state.span_s < self.best[0].span_s * (1 - LEAST):
            self.best = [state]
            self.progress(self.passes, state.span_s, self.bound_s)

    def starts(self) -> list[_State]:
        """Orders to improve, from priority rules and named schedules, the fastest first.

        When time is up, one priority rule that fits is enough; named schedules are always tried.
        """
        found = list[_State]()
        for shop in self.shops:
            quick = max(4, int(self.effort / (8 * len(self.shops) * len(shop.takes)))) if self.effort < inf else 10**9
            for name, orders in _first_orders(self.pipeline, shop, quick):
                ends = shop.ends_s(orders)
                if ends is None or not all(shop.fits(order, rank) for rank, order in enumerate(orders)):
                    continue
                found.append(_State(shop, orders, shop.span_s(orders, ends), name))
                self.enter(found[-1])
                if name == LISTED and monotonic() >= self.until:
                    break
        found.sort(key=lambda state: (state.span_s, sum(state.shop.held(state.orders))))
        self.best = found[:1]
        chosen, seen = list[_State](), set[tuple[str, float]]()
        for state in found:
            key = state.shop.placement.name, round(state.span_s / found[0].span_s, 6)
            if key not in seen:
                seen.add(key)
                chosen.append(state)
        return chosen

    def improve(self, states: list[_State]) -> None:
        """Improve the orders in rounds; each round keeps the better half and doubles its changes."""
        lists = [[each for each in states if each.shop is shop][:STARTS] for shop in self.shops]
        rounds, seed = FIRST_ROUNDS, self.seed
        while any(lists) and self.goes_on():
            for state in [each for some in lists for each in some]:
                if self.goes_on():
                    self.anneal(state, rounds, seed)
                seed += 1
            for place, bound_s in enumerate(self.bounds):
                better = sorted(lists[place], key=lambda state: state.span_s)[: max(1, len(lists[place]) // 2)]
                lists[place] = better if bound_s < self.best[0].span_s * (1 - LEAST) else []
            rounds *= 2

    def anneal(self, state: _State, rounds: int, seed: int) -> None:
        """Improve one of the orders."""
        size, begun = len(state.shop.takes), self.passes
        rounds = int(min(rounds, max(1, (self.effort - self.passes) / size)))
        for turn, orders in annealed(state.shop, state.orders, rounds, self.bound_s * (1 + LEAST), seed):
            self.passes = begun + turn * size
            if orders is not state.orders:
                ends = state.shop.ends_s(orders)
                assert ends is not None
                state.orders, state.span_s = orders, state.shop.span_s(orders, ends)
                self.enter(_State(state.shop, orders, state.span_s, state.began))
            self.progress(self.passes, self.best[0].span_s, self.bound_s)
            if monotonic() >= self.until:
                return
        self.passes = begun + rounds * size


def _first_orders(pipeline: Pipeline, shop: Shop, quick: int) -> Iterator[tuple[str, Orders]]:
    """Orders of named schedules and of priority rules, each with a name."""
    for schedule, table in named_tables(pipeline, min(shop.limit)):
        if schedule.copies == 1 and table.stages == shop.stages.size and _on(table, shop.stages):
            yield schedule.name, shop.orders_of(table)
    for habits in HABITS[:quick]:
        yield LISTED, listed(shop, habits)


def named_tables(pipeline: Pipeline, memory_limit: float) -> Iterator[tuple[Schedule, ActionTable]]:
    """Named synchronous schedules that serve a pipeline, without the searched one.

    Schedules whose order depends on the memory come twice: for the limit, and without one.
    """
    for schedule in SCHEDULES.values():
        if not schedule.synchronous or schedule.name == NAME:
            continue
        for limit in (memory_limit, inf):
            asked = replace(pipeline, memory_limit=limit)
            if all(rule.holds(asked) for rule in schedule.rules):
                yield schedule, schedule.order(asked)


def _on(table: ActionTable, stages: Array) -> bool:
    """True if each stage is on the rank that a placement gives it."""
    return bool((table.stage[:, None] == stages[table.rank]).any(axis=1).all())


def durations_of(pipeline: Pipeline) -> Durations:
    """Durations for a pipeline with an equal share of the model on each stage."""
    times, chunks = pipeline.times, pipeline.chunks
    return Durations(
        forward_s=times.forward_s / chunks,
        input_gradient_s=times.input_gradient_s / chunks,
        weight_gradient_s=times.weight_gradient_s / chunks,
        message_s=times.message_s,
    )


def limits_of(memory_limit: Num, ranks: int) -> list[float]:
    """The limit of each rank.

    Raises:
        UserError: a limit is below one micro-batch, or the number of limits is not that of the ranks.
    """
    given = np.asarray(memory_limit, np.float64)
    if given.shape not in ((), (ranks,)):
        raise UserError(f"memory limits of {given.size} ranks", hint=f"a number, or one for each of {ranks} ranks")
    limits: list[float] = np.broadcast_to(given, (ranks,)).tolist()
    for rank, limit in enumerate(limits):
        if not limit >= 1:
            raise UserError(
                f"a memory limit of {limit:g} micro-batches on rank {rank}",
                hint="1 or more: a rank holds the activations of one micro-batch at least",
            )
    return limits


def _shops(pipeline: Pipeline, durations: Durations, limits: Sequence[float], deferred: float) -> list[Shop]:
    p, stages = pipeline.ranks, pipeline.ranks * pipeline.chunks
    names = ("forward_s", "input_gradient_s", "weight_gradient_s")
    seconds = np.array([spread(getattr(durations, name), (stages,), name) for name in names])
    if not (seconds[0] > 0).all():
        raise UserError(f"a forward pass of {seconds[0].min():g} s", hint="above 0")
    given = durations.message_s
    message_s = spread(given(*np.indices((p, p))) if callable(given) else given, (p, p), "message_s")
    slowdown = spread(durations.slowdown, (p,), "slowdown")
    found = []
    for placement in PLACEMENTS:
        if placement.chunks == pipeline.chunks:
            owner = np.empty(stages, np.int64)
            owner[placement.stages(p).ravel()] = np.repeat(np.arange(p), placement.chunks)
            slowed = seconds * slowdown[owner]
            found.append(shop_of(placement, pipeline.micro_batches, slowed, message_s, limits, deferred))
    return found


def _order(pipeline: Pipeline) -> ActionTable:
    limit = 2 * pipeline.ranks if pipeline.memory_limit == inf else pipeline.memory_limit
    return synthesised(replace(pipeline, memory_limit=limit), effort=QUICK).table


SEARCHED: Final = Schedule(
    name=NAME,
    source="our search; reference: Qi et al., arXiv 2401.10241, section 3",
    order=_order,
    rules=(
        Rule(text="1 or 2 chunks", holds=lambda p: p.chunks <= 2),
        WHOLE_SEQUENCES,
        Rule(text="memory for the activations of one micro-batch at least", holds=lambda p: p.memory_limit >= 1),
    ),
    splits=True,
    fills=2.0,
    bubble=zero_bubble_s,
    held=lambda p, _: zero_bubble_in_flight(p.ranks, p.micro_batches, 2),
    to_host=True,
    exact=lambda _: False,
    held_is_exact=False,
    bound="a bound: its order is searched; bubble and activations are those of zb-h2",
    note="searched for the times and the memory that are given, no slower than the others that fit; by default "
    "twice the memory of 1F1B; an estimate takes the closed forms of zb-h2",
)
