r"""Simulation of data-parallel training through parameter servers: bulk-synchronous, stale-synchronous, asynchronous.

Each of $n$ workers repeats a clock: it asks for the parameters (pull), computes, and sends its gradients (push). A
worker may begin clock $c$ once all workers have pushed their clock $c - s - 1$, where $s$ is the staleness bound: 0 is
bulk-synchronous (BSP), infinity asynchronous (ASP), between them stale-synchronous (SSP, Ho et al. 2013).

All servers together are one queue for pushes and one for pulls, first come first served, because each worker sends the
same share of its bytes to each server at the same time. Pushes and pulls use the two directions of the servers' links.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from steptime.num import Array

ASYNCHRONOUS: Final = 2**31
"""Staleness bound that no run reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """Times of one clock of a worker without other workers; seconds."""

    forward_s: float
    """Passes that need the parameters one piece after the other."""
    between_s: float
    """Compute with which neither a pull nor a push overlaps."""
    backward_s: float
    """Passes that finish the gradients one piece after the other."""
    pull_s: float
    """Transfer of parameters over the worker's link."""
    push_s: float
    """Transfer of gradients over the worker's link."""
    serve_pull_s: float
    """Transfer of one worker's parameters over the servers' links."""
    serve_push_s: float
    """Transfer of one worker's gradients over the servers' links, or into their memory if that is slower."""
    latency_s: float = 0.0
    """Latency of a pull, and of a push."""
    round_s: float = 0.0
    """Work of the servers once all gradients of a clock have arrived."""
    pieces: int = 1
    """Pieces in which parameters and gradients travel during the passes; 1: nothing overlaps."""

    @property
    def compute_s(self) -> float:
        """Compute of a worker in a clock."""
        return self.forward_s + self.between_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """One failure and recovery of a worker or a server."""

    at_s: float
    down_s: float
    worker: int | None = None
    """Index of the worker that fails; None: a server, whose shard of the parameters all workers need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Times of every clock of every worker; arrays of seconds (workers, clocks) unless noted."""

    bound: int
    free_s: Array
    """When the worker has finished the clock before."""
    pulled_s: Array
    """When the worker asks for the parameters, once the staleness bound allows it."""
    waited_s: Array
    """Duration of waiting for other workers: before the pull or, in an all-reduce, after computing."""
    done_s: Array
    """When the worker's gradients are at the servers."""
    compute_s: Array
    """Duration of computing in the clock."""
    gate_s: Array
    """When all workers have pushed a clock (clocks)."""

    @property
    def clocks_behind(self) -> Array:
        """Clocks of updates that a pull lacks compared with BSP; at most `bound`."""
        clocks = np.arange(self.pulled_s.shape[1])
        complete = np.searchsorted(self.gate_s, self.pulled_s, side="right")
        behind: Array = np.maximum(clocks - complete, 0)
        return behind

    @property
    def delays(self) -> Array:
        """Delay of each gradient: gradients of others that reached the servers between its pull and its push."""
        order = np.sort(self.done_s, axis=None)
        before = np.searchsorted(order, self.done_s, side="left")
        seen = np.searchsorted(order, self.pulled_s, side="right")
        late: Array = np.maximum(before - seen, 0)
        return late

    def window(self) -> tuple[int, int]:
        """First and last clock of the steady part: from a quarter to three quarters, or to the end of a worker."""
        clocks = len(self.gate_s)
        last = int(np.searchsorted(self.gate_s, float(self.done_s[:, -1].min()), side="left")) - 1
        last = max(min(last, 3 * clocks // 4), 1)
        return min(clocks // 4, last // 2), last

    def rate_per_s(self) -> float:
        """Gradients that arrive per second within the window."""
        first, last = self.window()
        begin, end = self.gate_s[first], self.gate_s[last]
        return float(((self.done_s > begin) & (self.done_s <= end)).sum() / (end - begin))

    def shares(self) -> tuple[float, float, float]:
        """Shares of the workers' time: computing, exchanging, and waiting for others."""
        first, last = self.window()
        inside = (self.done_s > self.gate_s[first]) & (self.done_s <= self.gate_s[last])
        whole = float((self.done_s - self.free_s)[inside].sum())
        computing = float(self.compute_s[inside].sum()) / whole
        waiting = float(self.waited_s[inside].sum()) / whole
        return computing, 1 - computing - waiting, waiting

    def time_of(self, count: int) -> float:
        """Time at which the servers have ``count`` gradients."""
        return float(np.sort(self.done_s, axis=None)[count - 1])


def draw_factors(workers: int, clocks: int, *, jitter: float, slow: float, slow_workers: int, seed: int) -> Array:
    r"""Factors of the computing time: lognormal with mean 1, times ``slow`` for the last ``slow_workers`` workers.

    $$f = e^{\sigma z - \sigma^2 / 2}, \qquad \sigma^2 = \ln(1 + v^2)$$

    where $v$ = `jitter` is the coefficient of variation and $z$ is standard normal.

    >>> draw_factors(3, 2, jitter=0.0, slow=1.5, slow_workers=1, seed=0).tolist()
    [[1.0, 1.0], [1.0, 1.0], [1.5, 1.5]]
    """
    variance = np.log1p(jitter**2)
    factors: Array = np.exp(
        np.sqrt(variance) * np.random.default_rng(seed).standard_normal((workers, clocks)) - variance / 2
    )
    factors[workers - slow_workers :] *= slow
    return factors


class _Link:
    """A queue at the servers, first come first served, which stops while a server is down."""

    def __init__(self, service_s: float, outage: Outage | None) -> None:
        self._service_s = service_s
        self._free_s = 0.0
        fails = outage is not None and outage.worker is None
        self._at_s, self._down_s = (outage.at_s, outage.down_s) if fails and outage is not None else (np.inf, 0.0)

    def finish_s(self, asked_s: Array) -> Array:
        """Times at which requests, in order of their times, are served."""
        late = np.maximum(asked_s - self._down_s, self._at_s)
        at = np.where(asked_s < self._at_s, asked_s, late)
        steps = self._service_s * np.arange(len(at))
        ends = np.maximum(np.maximum.accumulate(at - steps), self._free_s) + steps + self._service_s
        self._free_s = float(ends[-1])
        done: Array = np.where((ends > self._at_s) | (asked_s >= self._at_s), ends + self._down_s, ends)
        return done


class _Run:
    """State of a simulation that advances in windows in which no worker both pulls and pushes."""

    def __init__(self, cycle: Cycle, factors: Array, bound: int, outage: Outage | None) -> None:
        self.cycle, self.factors, self.bound = cycle, factors, bound
        workers, clocks = factors.shape
        self.clock = np.zeros(workers, dtype=np.int64)
        self.free = np.zeros(workers)
        self.ready, self.push_at = np.zeros(workers), np.full(workers, np.inf)
        self.free_s, self.pulled_s, self.done_s = (np.full((workers, clocks), np.inf) for _ in range(3))
        self.gate_s = np.full(clocks + 1, np.inf)
        self.gate_s[-1] = 0.0  # index -1: the clocks before the first
        self.complete = 0
        self.up, self.down = _Link(cycle.serve_push_s, outage), _Link(cycle.serve_pull_s, outage)
        self.outage = outage if outage is not None and outage.worker is not None else None
        least = cycle.forward_s + cycle.between_s + cycle.backward_s / cycle.pieces
        self.ahead_s = float(factors.min()) * least
        """Least time from a pull to its push: pushes and pulls within a window of this length are independent."""

    def pull_at(self) -> Array:
        """Time at which each worker asks for parameters; infinity while it computes, waits, or has finished."""
        clocks = self.factors.shape[1]
        gate = self.gate_s[np.maximum(self.clock - self.bound - 1, -1)]
        busy = (self.push_at < np.inf) | (self.clock >= clocks)
        return np.where(busy, np.inf, np.maximum(self.free, gate))

    def push(self, limit_s: float) -> None:
        """Play all pushes before the limit."""
        who = np.flatnonzero(self.push_at < limit_s)
        if not len(who):
            return
        who = who[np.argsort(self.push_at[who], kind="stable")]
        c, asked = self.cycle, self.push_at[who]
        backward_s = c.backward_s * self.factors[who, self.clock[who]]
        last_piece = self.ready[who] + backward_s + c.push_s / c.pieces
        done = c.latency_s + np.maximum(np.maximum(last_piece, asked + c.push_s), self.up.finish_s(asked))
        self.done_s[who, self.clock[who]] = self.free[who] = done
        self.clock[who] += 1
        self.push_at[who] = np.inf
        while self.complete < int(self.clock.min()):
            self.gate_s[self.complete] = self.done_s[:, self.complete].max() + c.round_s
            self.complete += 1

    def pull(self, limit_s: float) -> None:
        """Play all pulls before the limit; pushes before it have been played."""
        at = self.pull_at()
        who = np.flatnonzero(at < limit_s)
        if self.outage is not None and self.outage.worker in who and self._fails(float(at[self.outage.worker])):
            at = self.pull_at()
            who = np.flatnonzero(at < limit_s)
        if not len(who):
            return
        who = who[np.argsort(at[who], kind="stable")]
        c, asked, factor = self.cycle, at[who], self.factors[who, self.clock[who]]
        self.free_s[who, self.clock[who]] = self.free[who]
        self.pulled_s[who, self.clock[who]] = asked
        arrived = c.latency_s + np.maximum(asked + c.pull_s, self.down.finish_s(asked))
        forward_s = c.forward_s * factor
        first = asked + c.latency_s + c.pull_s / c.pieces + forward_s
        self.ready[who] = np.maximum(first, arrived + forward_s / c.pieces) + c.between_s * factor
        self.push_at[who] = self.ready[who] + c.backward_s * factor / c.pieces

    def _fails(self, asked_s: float) -> bool:
        """Whether the worker loses the clock that it is about to begin; then it starts again after the outage."""
        assert self.outage is not None and self.outage.worker is not None
        worker, c = self.outage.worker, self.cycle
        alone_s = c.pull_s + c.push_s + 2 * c.latency_s + c.compute_s * self.factors[worker, self.clock[worker]]
        if asked_s + alone_s <= self.outage.at_s:
            return False
        self.free[worker] = max(asked_s, self.outage.at_s + self.outage.down_s)
        self.outage = None
        return True


def simulate(cycle: Cycle, factors: Array, bound: int, outage: Outage | None = None) -> Timeline:
    """Play all clocks of all workers.

    Time advances in windows shorter than any pull and its push, in which all pushes and then all pulls are played.

    Args:
        cycle: times of one clock.
        factors: factors of the computing time, workers by clocks (:func:`draw_factors`).
        bound: clocks by which a worker may be ahead of the slowest; :data:`ASYNCHRONOUS` for no bound.
        outage: a failure; a worker that fails repeats the work in flight.

    >>> cycle = Cycle(forward_s=1, between_s=0, backward_s=2, pull_s=1, push_s=1, serve_pull_s=0.5, serve_push_s=0.5)
    >>> run = simulate(cycle, np.ones((2, 8)), bound=0)
    >>> run.gate_s[:3].tolist(), run.rate_per_s()   # pull 1, compute 3, push 1: two gradients in 5 s
    ([5.0, 10.0, 15.0], 0.4)
    """
    run = _Run(cycle, factors, min(bound, factors.shape[1]), outage)
    while True:
        begin_s = min(float(run.pull_at().min()), float(run.push_at.min()))
        if begin_s == np.inf:
            break
        limit_s = max(begin_s + run.ahead_s, float(np.nextafter(begin_s, np.inf)))
        run.push(limit_s)
        run.pull(limit_s)
    return Timeline(
        bound=bound,
        free_s=run.free_s,
        pulled_s=run.pulled_s,
        waited_s=run.pulled_s - run.free_s,
        done_s=run.done_s,
        compute_s=cycle.compute_s * factors,
        gate_s=run.gate_s[:-1],
    )


def all_reduced(compute_s: float, exchange_s: float, factors: Array, outage: Outage | None = None) -> Timeline:
    """Data-parallel training with an all-reduce: a step is the slowest worker's compute, then the exchange.

    Args:
        compute_s: compute of a worker in a step.
        exchange_s: exposed part of the all-reduce.
        factors: factors of the computing time, workers by clocks.
        outage: failure of a worker, for which all wait; the step in flight is repeated.

    >>> all_reduced(1.0, 0.5, np.array([[1.0, 1.0], [2.0, 1.0]])).gate_s.tolist()
    [2.5, 4.0]
    """
    compute = compute_s * factors
    ends = np.cumsum(compute.max(axis=0) + exchange_s)
    begins = np.concatenate([[0.0], ends[:-1]])
    if outage is not None:
        lost = int(np.searchsorted(ends, outage.at_s, side="right"))
        if lost < len(ends):
            shift = outage.at_s + outage.down_s - begins[lost]
            ends[lost:] += shift
            begins[lost:] += shift
    shape = factors.shape
    return Timeline(
        bound=0,
        free_s=np.broadcast_to(np.concatenate([[0.0], ends[:-1]]), shape),
        pulled_s=np.broadcast_to(begins, shape),
        waited_s=compute.max(axis=0) - compute,
        done_s=np.broadcast_to(ends, shape),
        compute_s=compute,
        gate_s=ends,
    )
