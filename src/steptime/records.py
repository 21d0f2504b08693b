"""Records of columns: dataclasses and mappings, within each other, whose leaves are arrays with an entry a row.

A leaf that is no array stands for all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Final, TypeVar

import numpy as np
from numpy import ndarray

from steptime.num import Array

T = TypeVar("T")


def rows(record: T, index: Array) -> T:
    """The rows of a record at ``index``, whole numbers.

    >>> rows({"a": np.array([1.0, 2.0, 3.0]), "b": 4.0}, np.array([2, 0]))
    {'a': array([3., 1.]), 'b': 4.0}
    """
    return changed(record, lambda leaf: leaf.take(index) if isinstance(leaf, ndarray) else leaf)


_PRIME: Final = np.uint64(0x9E3779B97F4A7C15)


def distinct(columns: Sequence[Array]) -> tuple[Array, Array]:
    """Places of one of each kind of equal rows of some columns of equal length, and for each row its kind's number.

    A row that shares the place at which equal rows are looked for with another kind may be a kind of its own.

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


FEW: Final = 256
"""Rows that are computed each by itself: to find those that are equal takes as long."""


def computed(formula: Callable[[Mapping[str, Any]], T], given: Mapping[str, Any], telling: Sequence[Any]) -> T:
    """What a formula makes of arguments, computed once for rows that are equal in those that tell the others.

    Args:
        formula: from arguments, numbers or columns of equal length, to a record of columns of the same length.
        given: the arguments.
        telling: those from which all others of a row follow.

    >>> calls = []
    >>> def squares(given):
    ...     calls.append(len(given["x"]))
    ...     return given["x"] ** 2
    >>> x = np.repeat([3.0, 4.0], 200)
    >>> float(computed(squares, {"x": x}, [x]).sum()), calls
    (5000.0, [2])
    """
    columns = [value for value in telling if isinstance(value, ndarray)]
    if not columns or columns[0].size <= FEW or any(column.shape != (columns[0].size,) for column in columns):
        return formula(given)
    one, number = distinct(columns)
    return rows(formula(rows(given, one)), number)


def hashes(columns: Iterable[Array], count: int) -> Array:
    """A number of 64 bits of each of ``count`` rows of columns, whole or floating point; equal rows have the same."""
    out = np.zeros(count, dtype=np.uint64)
    for column in columns:
        wide = column.astype(np.float64 if column.dtype.kind == "f" else np.int64, copy=False)
        out = (out ^ wide.view(np.uint64)) * _PRIME
        out ^= out >> np.uint64(29)
    return out * _PRIME


def changed(record: T, change: Callable[[Any], Any]) -> T:
    """A record with each leaf as ``change`` makes it of the leaf that it was, in the order of :func:`leaves`."""
    made: Any
    make: Any = type(record)
    if isinstance(record, (ndarray, float)):
        made = change(record)
    elif names := _names(make):
        made = make(**{name: changed(getattr(record, name), change) for name in names})
    elif isinstance(record, Mapping):
        made = {name: changed(each, change) for name, each in record.items()}
    else:
        made = change(record)
    out: T = made
    return out


@cache
def _names(kind: Any) -> tuple[str, ...]:
    """Names of the fields of a dataclass; of other types none."""
    return tuple(f.name for f in fields(kind)) if is_dataclass(kind) else ()


def leaves(record: Any) -> Iterator[Any]:
    """Leaves of a record, in order.

    >>> list(leaves({"a": 1.0, "b": {"c": 2.0}}))
    [1.0, 2.0]
    """
    if isinstance(record, Mapping):
        for each in record.values():
            yield from leaves(each)
    elif is_dataclass(record):
        for f in fields(record):
            yield from leaves(getattr(record, f.name))
    else:
        yield record


def same_columns(one: Any, other: Any) -> bool:
    """Whether two records have leaves of the same names in the same places.

    >>> same_columns({"a": 1.0}, {"a": 2.0}), same_columns({"a": 1.0}, {"b": 1.0}), same_columns({"a": 1.0}, 1.0)
    (True, False, False)
    """
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and one.keys() == other.keys() and all(
            same_columns(each, other[name]) for name, each in one.items()
        )  # fmt: skip
    if is_dataclass(one):
        return type(one) is type(other) and all(
            same_columns(getattr(one, f.name), getattr(other, f.name)) for f in fields(one)
        )
    return not isinstance(other, Mapping) and not is_dataclass(other)
