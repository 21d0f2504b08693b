"""Records of columns: dataclasses and mappings, within each other, whose leaves are arrays with an entry a row.

A leaf that is no array stands for all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

from numpy import ndarray

from steptime.num import Array

T = TypeVar("T")


def rows(record: T, index: Array) -> T:
    """The rows of a record at ``index``, whole numbers.

    >>> import numpy as np
    >>> rows({"a": np.array([1.0, 2.0, 3.0]), "b": 4.0}, np.array([2, 0]))
    {'a': array([3., 1.]), 'b': 4.0}
    """
    return changed(record, lambda leaf: leaf.take(index) if isinstance(leaf, ndarray) else leaf)


def changed(record: T, change: Callable[[Any], Any]) -> T:
    """A record with ``change`` applied to each leaf, in the order of :func:`leaves`."""
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
    """True if two records have leaves of the same names in the same places.

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
