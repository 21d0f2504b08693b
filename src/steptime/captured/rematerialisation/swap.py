"""Choice of activations to move to the host, to recompute, or to keep, so that a step fits and waits least.

Each segment has a place for the tensors that its backward reads, its input $x_i$ and its saved activations $s_i$:

=================== ================================== ================= ================= =========================
place               stays on the device                goes to the host  runs again        bytes less than ``keep``
=================== ================================== ================= ================= =========================
``keep``            $x_i + s_i$                        nothing           no                0
``recompute``       $x_i$                              nothing           yes               $s_i$
``swap``            nothing                            $x_i + s_i$       no                $x_i + s_i$
``swap_input``      nothing                            $x_i$             yes               $x_i + s_i$
=================== ================================== ================= ================= =========================

The input of segment 0 belongs to the caller and stays. The rules of time:

* Compute is one queue: forward 0 ... N - 1, backward N - 1 ... 0, a segment that runs again just before its backward.
* Transfers out are one queue in forward order; one starts when its forward has ended, and frees its bytes when it ends.
* Transfers in are one queue in backward order, next to the transfers out. One starts when its own transfer out has
  ended, and not before a backward from which on its bytes, and those fetched before it, fit with every later peak.
* A forward or backward starts when its peak fits with what lives, and a backward when its transfer in has ended.

Nothing else waits; ``stall_s`` is the sum of the waits. All transfers run at the full rate of their link.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import TypeAlias

import numpy as np

from steptime.captured.rematerialisation.chain import Chain, Infeasible, check_limit, check_number, columns_of
from steptime.errors import FieldError
from steptime.num import Array


class Place(StrEnum):
    """Place of a segment's activations between its forward and its backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    SWAP = "swap"
    SWAP_INPUT = "swap_input"


MOVED = (Place.SWAP, Place.SWAP_INPUT)
AGAIN = (Place.RECOMPUTE, Place.SWAP_INPUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """Link between device and host in bytes per second; both directions run at the same time.

    Raises :class:`~steptime.errors.FieldError` where a rate is not above 0.
    """

    out_Bps: float
    in_Bps: float

    def __post_init__(self) -> None:
        check_number("host link", "out_Bps", self.out_Bps, positive=True)
        check_number("host link", "in_Bps", self.in_Bps, positive=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Swapped:
    """Cost of one place per segment."""

    places: tuple[Place, ...]
    fits: bool
    """True if every peak fits in the limit; otherwise the run ends early, and times and peak mean nothing."""
    time_s: float
    stall_s: float
    """Time that compute waits for transfers or for memory: the exposed part of the transfers."""
    recomputed_s: float
    moved_bytes: float
    """Bytes that are moved out, and back in."""
    peak_bytes: float
    """Largest number of bytes at the start of a forward or backward; incoming transfers count in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainArrays:
    """Numbers of a chain for the timeline, per segment; a pair is indexed by 1 if the segment runs again, else 0."""

    x: Array
    """Bytes of the input that can leave the device; 0 for the first segment."""
    saved: Array
    forward_s: Array
    backward_s: Array
    forward: tuple[Array, Array]
    """Peak of the forward beyond its input."""
    backward: tuple[Array, Array]
    """Peak of the backward, a second forward included, beyond its input."""
    start_bytes: float


def arrays_of(chain: Chain) -> ChainArrays:
    """The peaks of :func:`~steptime.captured.rematerialisation.chain.simulate`, per segment."""
    n, one = len(chain), columns_of(chain)
    x, reads = one.x, one.backward_peak
    saves = x[1:] + one.saved + one.saving
    next_to = np.append(one.d[1:n], x[n])
    inputs = x[:-1].copy()
    inputs[0] = 0.0
    return ChainArrays(
        x=inputs, saved=one.saved, forward_s=one.forward_s, backward_s=one.backward_s, start_bytes=float(x[0]),
        forward=(saves, x[1:] + one.forward), backward=(reads, np.maximum(reads, saves + next_to)),
    )  # fmt: skip


def timeline(work: ChainArrays, places: Sequence[Place], link: HostLink, limit_bytes: float) -> Swapped:
    """Run the rules of this module on one place per segment."""
    moved = np.array([place in MOVED for place in places])
    again = np.array([place in AGAIN for place in places])
    own = work.x + np.where(again, 0.0, work.saved)
    leaves = np.where(moved, own, 0.0)
    stays = np.cumsum(own - leaves) - (own - leaves) + work.start_bytes + work.x
    run = _Run(leaves.tolist(), link, limit_bytes)
    forward = stays + np.where(again, work.forward[1], work.forward[0])
    backward = stays + np.where(again, work.backward[1], work.backward[0])
    run.forward(forward.tolist(), work.forward_s.tolist())
    recomputed = np.where(again, work.forward_s, 0.0)
    if run.fits:
        run.backward(backward.tolist(), (work.backward_s + recomputed).tolist())
    return Swapped(
        places=tuple(places), fits=run.fits, time_s=run.now, stall_s=max(run.stall_s, 0.0),
        recomputed_s=float(recomputed.sum()), moved_bytes=float(leaves.sum()), peak_bytes=run.peak,
    )  # fmt: skip


class _Run:
    """The clock, the two links, and the bytes of segments on the device that will leave or have come back."""

    def __init__(self, leaves: list[float], link: HostLink, limit_bytes: float) -> None:
        self.leaves, self.link, self.limit = leaves, link, limit_bytes * (1 + 1e-12)
        self.out_end = [0.0] * len(leaves)
        self.out_free = 0.0
        self.now = self.stall_s = self.peak = 0.0
        self.fits = True
        self.leaving: list[int] = []

    def wait_until(self, time_s: float) -> None:
        if time_s > self.now:
            self.stall_s += time_s - self.now
            self.now = time_s

    def make_room(self, peak: float, below: int) -> None:
        """Wait for transfers out of segments before ``below`` until a peak fits with the rest of them."""
        out_end, now = self.out_end, self.now
        waiting = [k for k in self.leaving if out_end[k] > now and k < below]
        others = sum([self.leaves[k] for k in waiting])
        for k in waiting:
            if peak + others <= self.limit:
                break
            self.wait_until(out_end[k])
            others -= self.leaves[k]
        self.fits = self.fits and peak + others <= self.limit
        self.peak = max(self.peak, peak + others)

    def forward(self, peaks: list[float], times: list[float]) -> None:
        for i, (peak, time_s) in enumerate(zip(peaks, times, strict=True)):
            self.make_room(peak, i)
            if not self.fits:
                return
            self.now += time_s
            if self.leaves[i]:
                self.out_free = max(self.now, self.out_free) + self.leaves[i] / self.link.out_Bps
                self.out_end[i] = self.out_free
                self.leaving.append(i)

    def backward(self, peaks: list[float], times: list[float]) -> None:
        ahead = self._first_backward(peaks)
        opened = [0.0] * len(peaks)
        in_free, queue, fetched = 0.0, list(self.leaving), 0.0
        for j in reversed(range(len(peaks))):
            opened[j] = self.now
            back = self.now
            while queue and ahead[queue[-1]] >= j:
                i = queue.pop()
                in_free = max(in_free, self.out_end[i], opened[ahead[i]]) + self.leaves[i] / self.link.in_Bps
                fetched += self.leaves[i]
                self.leaving.remove(i)
                self.out_end[i] = in_free  # from here on, the end of its transfer in
            if self.leaves[j]:
                back = self.out_end[j]
                fetched -= self.leaves[j]
            self.make_room(peaks[j] + fetched, j)
            if not self.fits:
                return
            self.wait_until(back)
            self.now += times[j]

    def _first_backward(self, peaks: list[float]) -> list[int]:
        """Earliest backward at which the transfer in of each moved segment may start."""
        sums = np.concatenate([[0.0], np.cumsum(self.leaves)]).tolist()
        full = [peak + total for peak, total in zip(peaks, sums, strict=False)]
        ahead = list(range(len(peaks)))
        for i in self.leaving:
            while ahead[i] + 1 < len(peaks) and full[ahead[i] + 1] <= self.limit + sums[i]:
                ahead[i] += 1
        return ahead


#: Most segments for which :func:`try_all` weighs every choice.
MOST_TO_TRY = 10
#: Counts of each place that the first pass of :func:`choose_places` weighs; longer chains are sampled.
GRID = 32
#: Number of divisions that :func:`choose_places` improves.
STARTS = 4
#: Most segments for which :func:`choose_places` weighs every choice.
ALWAYS_TRIED = 6
PLACES = (Place.KEEP, Place.RECOMPUTE, Place.SWAP)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapSolution:
    """The chosen places, their cost, and a lower bound on the time of any choice."""

    best: Swapped
    bound_s: float

    @property
    def gap(self) -> float:
        """Largest fraction of the time by which a better choice could be faster."""
        return 1 - self.bound_s / self.best.time_s if self.best.time_s else 0.0


def weigh_places(chain: Chain, places: Sequence[Place], link: HostLink, limit_bytes: float = math.inf) -> Swapped:
    """Cost of one place per segment.

    Raises :class:`~steptime.errors.FieldError` where there is not one place per segment, or the limit is not a number.

    Three segments of 1 s forward and 2 s backward; the first saves 40 bytes, which take 2 s out and 4 s back. Both
    transfers overlap with the two other segments:

    >>> from steptime.captured.rematerialisation.chain import Segment
    >>> one = Segment(forward_s=1, backward_s=2, input_bytes=0, saved_bytes=40)
    >>> link, places = HostLink(out_Bps=20, in_Bps=10), (Place.SWAP, Place.KEEP, Place.KEEP)
    >>> weigh_places(Chain(segments=(one,) * 3), places, link).stall_s
    0.0
    >>> weigh_places(Chain(segments=(one,) * 3), places, HostLink(out_Bps=20, in_Bps=8)).stall_s
    1.0
    """
    check_limit(limit_bytes)
    if len(places) != len(chain):
        raise FieldError("swap", "places", f"has {len(places)} entries; the chain has {len(chain)} segments")
    return timeline(arrays_of(chain), [Place(place) for place in places], link, limit_bytes)


def bound_s(chain: Chain, link: HostLink, limit_bytes: float) -> float:
    """Lower bound on the time of any choice of places.

    When the last backward begins, the bytes over the limit must have left or be dropped. The link carries bytes without
    a wait from the end of the first forward on; every further byte costs a wait of 1 / rate, or the part of a forward
    run that recomputes it, whichever is cheaper. Relaxation: choices may be fractions, and everything else is free.
    """
    work = arrays_of(chain)
    last = float(work.x.sum() + work.saved[:-1].sum() + work.start_bytes + work.backward[0][-1])
    need = last - limit_bytes - link.out_Bps * float(work.forward_s[1:].sum())
    extra_s = 0.0
    wait = 1 / link.out_Bps
    cost = np.divide(work.forward_s, work.saved, out=np.full(len(chain), np.inf), where=work.saved > 0)
    for i in np.argsort(cost, kind="stable"):
        if need <= 0 or cost[i] >= wait:
            break
        freed = min(float(work.saved[i]), need)
        extra_s += freed * float(cost[i])
        need -= freed
    return float(chain.base_s + extra_s + max(need, 0.0) * wait)


def try_all(
    chain: Chain, limit_bytes: float, link: HostLink, *, allowed: Sequence[Place] = PLACES
) -> SwapSolution | Infeasible:
    """The fastest of all choices, by enumeration.

    Raises :class:`~steptime.errors.FieldError` for more than :data:`MOST_TO_TRY` segments, a limit that is negative or
    not a number, or places without ``swap``.
    """
    _check(limit_bytes, allowed)
    if len(chain) > MOST_TO_TRY:
        raise FieldError("swap", "chain", f"has {len(chain)} segments; try_all takes at most {MOST_TO_TRY}")
    every = itertools.product(allowed, repeat=len(chain))
    return _answer(chain, limit_bytes, link, _weighed(_weigher(chain, link, limit_bytes), every))


def choose_places(
    chain: Chain, limit_bytes: float, link: HostLink, *, allowed: Sequence[Place] = PLACES
) -> SwapSolution | Infeasible:
    """A fast choice, with a lower bound on the fastest.

    For chains up to :data:`ALWAYS_TRIED` segments, all choices are weighed. For longer ones, first every division of
    the chain into runs of one place each, in every order of the places (a sample of them, from :data:`GRID` segments
    on); then, from the :data:`STARTS` best, single segments change their place, or two exchange theirs, as long as that
    is faster. ``gap`` is proved.

    Raises :class:`~steptime.errors.FieldError` for a limit that is negative or no number, or places without ``swap``.
    """
    _check(limit_bytes, allowed)
    if len(chain) <= ALWAYS_TRIED:
        return try_all(chain, limit_bytes, link, allowed=allowed)
    weigh = cache(_weigher(chain, link, limit_bytes))
    found = _weighed(weigh, _divisions(len(chain), tuple(dict.fromkeys(allowed))))
    starts = found if len(chain) <= GRID else found[:1]
    return _answer(chain, limit_bytes, link, [_improved(one, weigh, allowed) for one in starts])


Weigher: TypeAlias = Callable[[tuple[Place, ...]], Swapped]


def _weigher(chain: Chain, link: HostLink, limit_bytes: float) -> Weigher:
    """Function that returns the cost of places in a chain."""
    work = arrays_of(chain)
    return lambda places: timeline(work, places, link, limit_bytes)


def _weighed(weigh: Weigher, choices: Iterable[tuple[Place, ...]]) -> list[Swapped]:
    """The best :data:`STARTS` choices that fit, best first."""
    every = map(weigh, choices)
    return heapq.nsmallest(STARTS, (one for one in every if one.fits), key=_key)


def _answer(chain: Chain, limit_bytes: float, link: HostLink, found: Sequence[Swapped]) -> SwapSolution | Infeasible:
    if not found:
        return Infeasible(limit_bytes=limit_bytes, least_bytes=least_bytes(chain))
    best = min(found, key=_key)
    return SwapSolution(best=best, bound_s=min(bound_s(chain, link, limit_bytes), best.time_s))


def _key(one: Swapped) -> tuple[float, float, float]:
    """Sort key: time, then recomputed time, then moved bytes."""
    return one.time_s, one.recomputed_s, one.moved_bytes


def least_bytes(chain: Chain) -> float:
    """Smallest feasible limit if time does not matter: activations of all segments but one are on the host."""
    work = arrays_of(chain)
    return float(work.start_bytes + (work.x + np.maximum(work.forward[0], work.backward[0])).max())


def _check(limit_bytes: float, allowed: Sequence[Place]) -> None:
    check_limit(limit_bytes)
    if Place.SWAP not in allowed:
        raise FieldError("swap", "allowed", "has no swap", hint="rotor.solve chooses without a host")


def _divisions(count: int, allowed: tuple[Place, ...]) -> Iterable[tuple[Place, ...]]:
    """Divisions of a chain into runs of one place each, in every order of places, with ends on a grid."""
    step = max(1, math.ceil(count / GRID))
    ends = sorted({*range(0, count, step), count})
    for order in itertools.permutations(allowed):
        for cuts in itertools.combinations_with_replacement(ends, len(order) - 1):
            lengths = np.diff([0, *cuts, count]).tolist()
            yield tuple(place for place, length in zip(order, lengths, strict=True) for _ in range(length))


def _improved(best: Swapped, weigh: Weigher, allowed: Sequence[Place]) -> Swapped:
    """Change one place, or exchange the places of two segments, as long as that is faster."""
    count = len(best.places)
    better = True
    while better:
        better = False
        for i in range(count):
            options = [(*best.places[:i], place, *best.places[i + 1 :]) for place in allowed if place != best.places[i]]
            for j in range(i + 1, count):
                if best.places[i] != best.places[j]:
                    changed = list(best.places)
                    changed[i], changed[j] = changed[j], changed[i]
                    options.append(tuple(changed))
            for places in options:
                one = weigh(places)
                if one.fits and _key(one) < _key(best):
                    best, better = one, True
                    break
    return best
