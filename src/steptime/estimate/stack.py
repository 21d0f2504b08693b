"""Many evaluations as one: numbers of equal records become columns of one record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


def stacked(items: Sequence[T], shape: tuple[int, ...] = (-1,)) -> T:
    """One record whose numbers are arrays over the items; what a key that an item's mapping lacks holds is zero there.

    ``shape``: that of the arrays.

    >>> stacked([{"a": 1.0}, {"a": 2.0, "b": 3.0}])
    {'a': array([1., 2.]), 'b': array([0., 3.])}
    """
    first: Any = items[0]
    if is_dataclass(first):
        columns = {f.name: stacked([getattr(item, f.name) for item in items], shape) for f in fields(first)}
        make: Any = type(first)
        return make(**columns)  # type: ignore[no-any-return]
    if isinstance(first, Mapping):
        maps: list[Any] = list(items)
        blank: dict[Any, Any] = {}
        for name in {name for each in maps for name in each}:
            blank[name] = _blank(next(each[name] for each in maps if name in each))
        out: Any = {name: stacked([each.get(name, blank[name]) for each in maps], shape) for name in sorted(blank)}
        return out  # type: ignore[no-any-return]
    column: Any = np.array(items, dtype=np.float64).reshape(shape)
    return column  # type: ignore[no-any-return]


def _blank(like: Any) -> Any:
    """A value of the kind of another that holds nothing."""
    if is_dataclass(like):
        make: Any = type(like)
        return make(**{f.name: _blank(getattr(like, f.name)) for f in fields(like)})
    return {} if isinstance(like, Mapping) else 0.0
