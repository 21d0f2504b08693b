"""Measured collectives as arrays: the arguments of the formulas, and the times."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np

from steptime.lab.calibrate.fitting import hashed
from steptime.num import Array


@dataclass(frozen=True, slots=True)
class Columns:
    """Rows as arrays of one length, one per field."""

    def take(self, index: Any) -> Self:
        """Rows by index or mask."""
        return type(self)(*(getattr(self, f.name)[index] for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Rows(Columns):
    """Measured collectives as arguments of `collective_s`."""

    kind: Array
    ranks: Array
    inside: Array
    size_bytes: Array
    element_bytes: Array
    measured_s: Array

    def merged(self) -> Rows:
        """One row, the median time, for each repetition of the same collective."""
        key = hashed([self.kind_number(), self.ranks, self.inside, self.size_bytes, self.element_bytes])
        order = np.lexsort((self.measured_s, key))
        edges = np.flatnonzero(np.diff(key[order], prepend=key[order][0] - np.uint64(1)))
        counts = np.diff(edges, append=len(order))
        return self.take(order[edges + (counts - 1) // 2])

    def kind_number(self) -> Array:
        """The kinds as numbers."""
        return np.unique(self.kind.astype(str), return_inverse=True)[1].astype(np.float64)

    def folds(self, count: int) -> Array:
        """Fold of each row: the sizes in ascending order are dealt out in turn, so a size is in one fold only."""
        place: Array = np.unique(self.size_bytes, return_inverse=True)[1] % count
        return place

    def thinned(self, most: int) -> Rows:
        """At most so many rows, spread over sizes, groups and kinds."""
        if len(self.ranks) <= most:
            return self
        order = np.lexsort((self.size_bytes, self.ranks, self.inside, self.kind_number()))
        return self.take(order[np.linspace(0, len(order) - 1, most).astype(np.int64)])
