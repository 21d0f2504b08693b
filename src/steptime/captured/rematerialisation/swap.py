"""Which activations to move to the host, to compute again, or to keep, so that a step fits and waits least.

Times and bytes of a choice are those of :mod:`~steptime.captured.rematerialisation.swap_timeline`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from steptime.captured.rematerialisation.chain import Chain, check_limit
from steptime.captured.rematerialisation.solution import Infeasible
from steptime.captured.rematerialisation.swap_timeline import ChainArrays, HostLink, Place, Swapped, arrays_of, timeline
from steptime.errors import FieldError

#: Segments up to which :func:`try_all` weighs every choice.
MOST_TO_TRY = 10
#: Counts of each place that the first pass of :func:`choose_places` weighs; longer chains are sampled.
GRID = 32
#: Divisions from which :func:`choose_places` improves.
STARTS = 4
#: Segments up to which it weighs every choice.
ALWAYS_TRIED = 6
PLACES = (Place.KEEP, Place.RECOMPUTE, Place.SWAP)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapSolution:
    """The places that were chosen, what they cost, and a bound that no choice beats."""

    best: Swapped
    bound_s: float

    @property
    def gap(self) -> float:
        """Fraction of the time by which a better choice could be faster at most."""
        return 1 - self.bound_s / self.best.time_s if self.best.time_s else 0.0


def weigh_places(chain: Chain, places: Sequence[Place], link: HostLink, limit_bytes: float = math.inf) -> Swapped:
    """Costs of one place per segment.

    Raises :class:`~steptime.errors.FieldError` where there is not one place per segment, or the limit is no number.

    Three segments of 1 s forward and 2 s backward; the first saves 40 bytes, which take 2 s out and 4 s back. Both
    ways hide behind the two other segments:

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
    """A time that no choice of places beats.

    When the last backward begins, the bytes over the limit must have left or be dropped. The link takes away what it
    carries from the end of the first forward on; every byte more costs a wait of 1 / rate, or the part of a forward
    run that makes it again, whichever is cheaper. Relaxed: choices may be fractions, and everything else is free.
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
    """The fastest choice of all, by weighing every one.

    Raises :class:`~steptime.errors.FieldError` for more than :data:`MOST_TO_TRY` segments, a limit that is negative or
    no number, or places without ``swap``.
    """
    _check(limit_bytes, allowed)
    if len(chain) > MOST_TO_TRY:
        raise FieldError("swap", "chain", f"has {len(chain)} segments; try_all takes at most {MOST_TO_TRY}")
    every = itertools.product(allowed, repeat=len(chain))
    return _answer(chain, limit_bytes, link, _weighed(arrays_of(chain), every, link, limit_bytes))


def choose_places(
    chain: Chain, limit_bytes: float, link: HostLink, *, allowed: Sequence[Place] = PLACES
) -> SwapSolution | Infeasible:
    """A fast choice, with the bound that says how far it can be from the fastest.

    Of chains up to :data:`ALWAYS_TRIED` segments, all choices are weighed. Of longer ones, first every division of the
    chain into runs of one place each, in every order of the places (a sample of them, from :data:`GRID` segments on);
    then, from the :data:`STARTS` best, single segments change their place, or two exchange theirs, as long as that is
    faster. ``gap`` is what is proved.

    Raises :class:`~steptime.errors.FieldError` for a limit that is negative or no number, or places without ``swap``.
    """
    _check(limit_bytes, allowed)
    if len(chain) <= ALWAYS_TRIED:
        return try_all(chain, limit_bytes, link, allowed=allowed)
    work = arrays_of(chain)
    found = _weighed(work, _divisions(len(chain), tuple(dict.fromkeys(allowed))), link, limit_bytes)
    starts = found if len(chain) <= GRID else found[:1]
    return _answer(chain, limit_bytes, link, [_improved(one, work, link, limit_bytes, allowed) for one in starts])


def _weighed(
    work: ChainArrays, choices: Iterable[Sequence[Place]], link: HostLink, limit_bytes: float
) -> list[Swapped]:
    """The best few of those that fit, best first."""
    every = (timeline(work, places, link, limit_bytes) for places in choices)
    return heapq.nsmallest(STARTS, (one for one in every if one.fits), key=_key)


def _answer(chain: Chain, limit_bytes: float, link: HostLink, found: Sequence[Swapped]) -> SwapSolution | Infeasible:
    if not found:
        return Infeasible(limit_bytes=limit_bytes, least_bytes=least_bytes(chain))
    best = min(found, key=_key)
    return SwapSolution(best=best, bound_s=min(bound_s(chain, link, limit_bytes), best.time_s))


def _key(one: Swapped) -> tuple[float, float, float]:
    """Faster first; of equal times, less to recompute, less to move."""
    return one.time_s, one.recomputed_s, one.moved_bytes


def least_bytes(chain: Chain) -> float:
    """Least limit that any places fit in, if time does not matter: all but one segment's activations are away."""
    work = arrays_of(chain)
    return float(work.start_bytes + (work.x + np.maximum(work.forward[0], work.backward[0])).max())


def _check(limit_bytes: float, allowed: Sequence[Place]) -> None:
    check_limit(limit_bytes)
    if Place.SWAP not in allowed:
        raise FieldError("swap", "allowed", "has no swap", hint="choose_blocks chooses between keep and recompute")


def _divisions(count: int, allowed: tuple[Place, ...]) -> Iterable[tuple[Place, ...]]:
    """Runs of one place each, in every order; ends of runs on a grid."""
    step = max(1, math.ceil(count / GRID))
    ends = sorted({*range(0, count, step), count})
    for order in itertools.permutations(allowed):
        for cuts in itertools.combinations_with_replacement(ends, len(order) - 1):
            lengths = np.diff([0, *cuts, count]).tolist()
            yield tuple(place for place, length in zip(order, lengths, strict=True) for _ in range(length))


def _improved(
    best: Swapped, work: ChainArrays, link: HostLink, limit_bytes: float, allowed: Sequence[Place]
) -> Swapped:
    """Change one place, or exchange two neighbours, as long as that helps."""
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
                one = timeline(work, places, link, limit_bytes)
                if one.fits and _key(one) < _key(best):
                    best, better = one, True
                    break
    return best
