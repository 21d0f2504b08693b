"""Arithmetic that means the same on Python numbers and on NumPy arrays.

Every formula of :mod:`steptime.cost` is written once with these helpers. Given Python
numbers they stay with Python numbers (a NumPy call on two floats costs four times as much and
turns everything after it into slow NumPy scalars); given an array anywhere, they broadcast.
SymPy expressions and Pint quantities pass through the plain operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy import ndarray

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]
else:
    Array = ndarray
#: A number or an array of numbers; formulas take and return these.
Num: TypeAlias = float | Array

T = TypeVar("T")


def maximum(a: Num, b: Num) -> Num:
    """Larger of the two, element by element.

    >>> maximum(1.0, 2.0)
    2.0
    """
    if isinstance(a, ndarray) or isinstance(b, ndarray):
        return np.maximum(a, b)
    return a if a >= b else b


def minimum(a: Num, b: Num) -> Num:
    """Smaller of the two, element by element.

    >>> minimum(1.0, 2.0)
    1.0
    """
    if isinstance(a, ndarray) or isinstance(b, ndarray):
        return np.minimum(a, b)
    return a if a <= b else b


def where(condition: Any, yes: Num, no: Num) -> Num:
    """``yes`` where the condition holds, else ``no``.

    Both sides are evaluated, so neither may fail where it is not chosen. One condition for all chooses a whole side,
    be it a number or an array.

    >>> where(3 > 2, 1.0, 0.0)
    1.0
    """
    if isinstance(condition, ndarray):
        return np.where(condition, yes, no)
    return yes if condition else no


def soft_maximum(a: Num, b: Num, sharpness: Num) -> Num:
    r"""Larger of two positive numbers, rounded off where they are nearly equal: $(a^p + b^p)^{1/p}$ with $p$ =
    `sharpness`.

    $p = 1$ adds them, $p = 2$ is the hypotenuse, and the larger $p$, the nearer it comes to the maximum.

    >>> soft_maximum(3.0, 4.0, 1), soft_maximum(3.0, 4.0, 2), round(soft_maximum(4.0, 4.0, 8), 3)
    (7.0, 5.0, 4.362)
    """
    soft: Num = (a**sharpness + b**sharpness) ** (1 / sharpness)
    return soft


def floor(x: Num) -> Num:
    """Largest whole number not above ``x``.

    >>> floor(2.5)
    2
    """
    return np.floor(x) if isinstance(x, ndarray) else math.floor(x)


def ceil(x: Num) -> Num:
    """Smallest whole number not below ``x``.

    >>> ceil(2.5)
    3
    """
    return np.ceil(x) if isinstance(x, ndarray) else math.ceil(x)


def exp(x: Num) -> Num:
    """Exponential.

    >>> exp(0.0)
    1.0
    """
    return np.exp(x) if isinstance(x, ndarray) else math.exp(x)


def log2(x: Num) -> Num:
    """Logarithm to base 2.

    >>> log2(8)
    3.0
    """
    return np.log2(x) if isinstance(x, ndarray) else math.log2(x)


def floor_div(a: Num, b: Num) -> Num:
    """Largest whole number not above ``a / b`` (for whole ``a``, ``b`` below 2^53).

    >>> floor_div(7, 2)
    3
    """
    if isinstance(a, ndarray) or isinstance(b, ndarray):
        return np.floor_divide(a, b)
    return a // b


def ceil_div(a: Num, b: Num) -> Num:
    """Smallest whole number not below ``a / b`` (for whole ``a``, ``b`` below 2^53).

    >>> ceil_div(7, 2)
    4
    """
    return -floor_div(-a, b)


def round_up(size: int, multiple: int) -> int:
    """Smallest multiple that is not below ``size``.

    >>> round_up(7, 4), round_up(8, 4)
    (8, 8)
    """
    return -(-size // multiple) * multiple


def greatest_common_divisor(a: Num, b: Num) -> Num:
    """Greatest common divisor of whole numbers.

    >>> greatest_common_divisor(12, 8.0)
    4
    """
    if isinstance(a, ndarray) or isinstance(b, ndarray):
        return np.gcd(np.asarray(a).astype(np.int64), np.asarray(b).astype(np.int64)).astype(np.float64)
    return math.gcd(int(a), int(b))


def divisors(n: int) -> list[int]:
    """All positive divisors of ``n``, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


def places_in_runs(lengths: Array) -> Array:
    """Place of each entry within its run, of runs that follow each other.

    >>> places_in_runs(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    places: Array = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return places


def taken(value: Any, index: Any) -> Any:
    """Entries of an array at ``index``; a number, which stands for all of them, stays.

    >>> float(taken(np.array([1.0, 2.0]), 1)), taken(3.0, 1)
    (2.0, 3.0)
    """
    return value[index] if isinstance(value, ndarray) else value


def joined(pieces: Sequence[Num], lengths: Sequence[int]) -> Num:
    """Concatenation of pieces, each an array or a number for all of its entries.

    If all pieces are the same number, the result is that number; a single piece stays unchanged.

    >>> joined([np.array([1.0, 2.0]), 3.0], [2, 1]).tolist(), joined([3.0, 3.0], [2, 1])
    ([1.0, 2.0, 3.0], 3.0)
    """
    first = pieces[0]
    if len(pieces) == 1 or all(not isinstance(piece, ndarray) and piece == first for piece in pieces):
        return first
    return np.concatenate([np.broadcast_to(piece, (n,)) for piece, n in zip(pieces, lengths, strict=True)])


def evenly_spread(rows: Sequence[T], most: int) -> list[T]:
    """At most ``most`` of the rows (at least two), evenly spread from the first to the last.

    >>> evenly_spread(range(11), 3), evenly_spread("ab", 3)
    ([0, 5, 10], ['a', 'b'])
    """
    if len(rows) <= most:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def weighted_quantiles(values: Any, weights: Any, levels: Any) -> Array:
    """Values at levels of the weight, linear between the middles of neighbouring weights.

    >>> weighted_quantiles([3.0, 1.0, 2.0], [1.0, 1.0, 2.0], [0.0, 0.5]).tolist()
    [1.0, 2.0]
    """
    found, weight = np.asarray(values), np.asarray(weights)
    order = np.argsort(found)
    rank = (np.cumsum(weight[order]) - weight[order] / 2) / weight.sum()
    out: Array = np.interp(levels, rank, found[order])
    return out


_PRIME: Final = np.uint64(0x9E3779B97F4A7C15)


def distinct(columns: Sequence[Array]) -> tuple[Array, Array]:
    """Index of one row of each group of equal rows of some columns, and the group number of each row.

    Hash collisions may split a group of equal rows into several.

    >>> [found.tolist() for found in distinct([np.array([7.0, 3.0, 7.0]), np.array([1, 1, 1])])]
    [[1, 2], [1, 0, 1]]
    """
    here = np.arange(len(columns[0]), dtype=np.int32)
    bits = len(here).bit_length() + 1
    slot = hashes(columns, len(here)) >> np.uint64(64 - bits)
    last = np.empty(1 << bits, dtype=np.int32)
    last[slot] = here
    same = last[slot]
    equal = np.ones(len(here), dtype=bool)
    for column in columns:
        equal &= column.take(same) == column
    one = np.flatnonzero((same == here) | ~equal)
    number = np.empty_like(here)
    number[one] = np.arange(len(one))
    return one, number.take(np.where(equal, same, here))


def hashes(columns: Iterable[Array], count: int) -> Array:
    """A 64-bit hash of each of ``count`` rows of columns, whole or floating point; equal rows have equal hashes."""
    out = np.zeros(count, dtype=np.uint64)
    for column in columns:
        wide = column.astype(np.float64 if column.dtype.kind == "f" else np.int64, copy=False)
        out = (out ^ wide.view(np.uint64)) * _PRIME
        out ^= out >> np.uint64(29)
    return out * _PRIME


FEW: Final = 256
"""Rows up to which all are computed, as the search for equal ones takes as long."""


def per_distinct(*, follows: tuple[str, ...] = ()) -> Callable[[Callable[..., Num]], Callable[..., Num]]:
    """Makes a function compute each distinct call once: results for numbers are cached, equal rows of columns merged.

    Args:
        follows: names of arguments that are determined by the others, so that rows need not be compared in them.

    >>> calls = []
    >>> @per_distinct()
    ... def square(name, x):
    ...     calls.append(np.size(x))
    ...     return x**2
    >>> float(square("a", x=np.repeat([3.0, 4.0], 200)).sum()), square("a", x=3.0), square("a", x=3.0), calls
    (5000.0, 9.0, 9.0, [2, 1])
    """

    def once(function: Callable[..., Num]) -> Callable[..., Num]:
        kept = lru_cache(maxsize=1 << 14)(function)

        @wraps(function)
        def call(*fixed: Any, **given: Any) -> Num:
            try:
                return kept(*fixed, **given)
            except TypeError:  # an array has no hash; asking each argument for its type costs more
                pass
            columns = [value for name, value in given.items() if isinstance(value, ndarray) and name not in follows]
            if not columns or columns[0].size <= FEW or any(column.shape != (columns[0].size,) for column in columns):
                return function(*fixed, **given)
            one, number = distinct(columns)
            found = function(*fixed, **{name: taken(value, one) for name, value in given.items()})
            out: Num = taken(found, number)
            return out

        return call

    return once
