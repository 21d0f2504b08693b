"""Simulated annealing of the orders of passes: small changes on the longest path."""

from __future__ import annotations

from collections.abc import Iterator
from math import exp
from random import Random
from typing import Final

from steptime.simulation.shop import Orders, Shop, W

WARM: Final = 0.05
"""Share of the span by which a change may lengthen it at first; it falls to a hundredth of this share."""


def annealed(shop: Shop, orders: Orders, rounds: int, enough_s: float, seed: int) -> Iterator[tuple[int, Orders]]:
    """Yield (changes tried, best orders) each time the span of the best orders falls, and every 64 changes.

    A change moves one pass of a rank that is on the longest path through the ranks: to the front or the back of the
    passes that follow each other there without a wait, or, of weight-gradient passes, to another place of the rank. A
    change that lengthens the span is kept with a chance that falls as rounds pass (simulated annealing).

    Args:
        shop: the pipeline.
        orders: the orders to start from; nothing is yielded if they cannot run.
        rounds: number of changes to try.
        enough_s: span at which to stop.
        seed: seed of the random changes.
    """
    random = Random(seed)
    now = [list(order) for order in orders]
    ends = shop.ends_s(now)
    if ends is None:
        return
    span_s = best_s = shop.span_s(now, ends)
    best = orders
    for turn in range(rounds):
        if best_s <= enough_s:
            break
        warmth_s = best_s * WARM * 0.01 ** (turn / rounds)
        change = _change(shop, now, ends, random)
        if change is not None:
            rank, order = change
            before, now[rank] = now[rank], order
            found = shop.ends_s(now) if shop.fits(order, rank) else None
            other_s = shop.span_s(now, found) if found is not None else None
            if (
                found is None
                or other_s is None
                or (other_s > span_s and random.random() >= exp((span_s - other_s) / warmth_s))
            ):
                now[rank] = before
            else:
                ends, span_s = found, other_s
                if span_s < best_s * (1 - 1e-9):
                    best_s, best = span_s, [list(each) for each in now]
                    yield turn + 1, best
        if turn % 64 == 63:
            yield turn + 1, best


def _change(shop: Shop, orders: Orders, ends: list[float], random: Random) -> tuple[int, list[int]] | None:
    """A rank and a changed order of its passes; None: no change was found."""
    blocks = _blocks(shop, orders, ends)
    if not blocks:
        return None
    rank, low, high = random.choice(blocks)
    order, size = orders[rank], shop.stages.size * shop.micro_batches
    m = shop.micro_batches
    turns = [at for at in range(low, high) if order[at] // m != order[at + 1] // m]
    if not turns:
        return None
    draw = random.random()
    weights = [at for at in range(low, high + 1) if order[at] // size == W]
    if weights and draw < 0.4:
        at = random.choice(weights)
        to = random.randrange(len(order)) if draw < 0.1 else _to_a_gap(shop, order, ends, at, low, high, random)
        return rank, _moved(order, at, to, m)
    if draw < 0.7:
        at = random.choice(turns[-2:] if random.random() < 0.5 else turns[:2])
        return rank, _moved(order, at, at + 1, m)
    at = random.choice(turns)
    if random.random() < 0.5:
        return rank, _moved(order, at + 1, random.randint(low, at), m)
    return rank, _moved(order, at, random.randint(at + 1, high), m)


def _to_a_gap(shop: Shop, order: list[int], ends: list[float], at: int, low: int, high: int, random: Random) -> int:
    """A place in the rank's order, outside the block, at which the rank waits; its end if there is none."""
    takes = shop.takes
    gaps = [
        each
        for each in range(1, len(order))
        if not low < each <= high and ends[order[each]] - takes[order[each]] > ends[order[each - 1]] + 1e-12
    ]
    to = random.choice([*gaps, len(order)])
    return to - (to > at)


def _moved(order: list[int], at: int, to: int, m: int) -> list[int]:
    """A pass at another place of its rank; passes of the same kind and stage keep the order of their micro-batches."""
    found = list(order)
    found.insert(to, found.pop(at))
    letter = order[at] // m
    if to > at + 1 or to < at - 1:
        low, high = min(at, to), max(at, to) + 1
        places = [each for each in range(low, high) if found[each] // m == letter]
        for place, number in zip(places, sorted(found[each] for each in places), strict=True):
            found[place] = number
    return found


def _blocks(shop: Shop, orders: Orders, ends: list[float]) -> list[tuple[int, int, int]]:
    """The longest path: rank, and first and last place of passes on it that follow each other without a wait."""
    takes, awaits, owner = shop.takes, shop.awaits, shop.owner
    none = len(takes)
    rank = max(range(shop.ranks), key=lambda r: ends[orders[r][-1]] - ends[orders[r][0]] + takes[orders[r][0]])
    at = high = len(orders[rank]) - 1
    found = []
    while True:
        order = orders[rank]
        number = order[at]
        start = ends[number] - takes[number]
        if at and ends[order[at - 1]] >= start - 1e-12:
            at -= 1
            continue
        if high > at:
            found.append((rank, at, high))
        number = awaits[number]
        if number == none:
            return found
        rank = owner[number]
        at = high = orders[rank].index(number)
