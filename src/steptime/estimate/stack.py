"""Many evaluations as one: numbers of equal records become columns of one record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


def stacked(items: Sequence[T]) -> T:
    """One record whose numbers are arrays over the items; a key that an item's mapping lacks counts as zero there.

    >>> stacked([{"a": 1.0}, {"a": 2.0, "b": 3.0}])
    {'a': array([1., 2.]), 'b': array([0., 3.])}
    """
    first: Any = items[0]
    if is_dataclass(first):
        columns = {f.name: stacked([getattr(item, f.name) for item in items]) for f in fields(first)}
        make: Any = type(first)
        return make(**columns)  # type: ignore[no-any-return]
    if isinstance(first, Mapping):
        maps: list[Any] = list(items)
        names = sorted({name for each in maps for name in each})
        out: Any = {name: stacked([each.get(name, 0.0) for each in maps]) for name in names}
        return out  # type: ignore[no-any-return]
    column: Any = np.array(items, dtype=np.float64)
    return column  # type: ignore[no-any-return]
