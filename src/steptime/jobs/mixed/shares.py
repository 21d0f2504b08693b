"""Unequal shares of the batch: each group has whole replicas, a plan of its own, and a share to match its speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import gcd, inf

Time = Callable[[int], float]
"""Step time of a group as a function of its number of parts; it does not fall with more parts."""
Shares = tuple[int, ...]


def best_shares(times: Sequence[Time], units: Sequence[int], batch: int) -> tuple[Shares, float]:
    r"""Parts of each group that minimise the time of the slowest group.

    $$\min_n \max_g t_g(n_g) \quad\text{with}\quad \sum_g u_g n_g = B,\quad n_g \ge 1$$

    With more parts in the first of two groups, its time does not fall and the other's does not rise: the best share is
    next to their crossing, which bisection finds. With more groups, each share of the first is tried with the best
    shares of the others.

    Args:
        times: seconds of each group by its number of parts.
        units: sequences of a part.
        batch: sequences of a step.

    Returns:
        Parts of each group, and the time of the slowest; infinite if no shares add up to the batch.

    >>> best_shares([lambda n: 1.0 * n, lambda n: 3.0 * n], [1, 1], 8), best_shares([float, float], [2, 4], 7)
    (((6, 2), 6.0), ((), inf))
    """
    first, rest = lru_cache(maxsize=None)(times[0]), times[1:]
    unit = units[0]
    if not rest:
        return ((batch // unit,), first(batch // unit)) if batch >= unit and batch % unit == 0 else ((), inf)
    others = lru_cache(maxsize=None)(lambda left: best_shares(rest, units[1:], left))
    common = gcd(*units[1:])
    fitting: Sequence[int] = [
        n for n in range(1, batch // unit + 1) if (batch - unit * n) > 0 and (batch - unit * n) % common == 0
    ]

    def both(n: int) -> tuple[Shares, float]:
        shares, slowest = others(batch - unit * n)
        return (n, *shares), max(first(n), slowest)

    if len(rest) == 1:
        fitting = _next_to_crossing(fitting, lambda n: first(n) - others(batch - unit * n)[1])
    found = min((both(n) for n in fitting), key=lambda one: one[1], default=((), inf))
    return found if found[1] < inf else ((), inf)


def _next_to_crossing(ordered: Sequence[int], rises: Callable[[int], float]) -> Sequence[int]:
    """The last element at which a non-decreasing function is negative, and the first at which it is not."""
    low, high = 0, len(ordered)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if rises(ordered[middle]) < 0 else (low, middle)
    return ordered[max(low - 1, 0) : low + 1]
