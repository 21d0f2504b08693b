"""The cost model: the closed form, and what it misses as learned from measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from steptime.num import Array
from steptime_lab.hierarchy.tune.prior import Predicted

LEAST: Final = 8
"""Measurements from which on the closed form is corrected."""
TREES: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Schedules of one product that were measured."""

    features: Array
    cycles: Array
    """By the closed form."""
    seconds: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Ranks schedules: the logarithm of the closed form, plus what trees have learned of the difference."""

    trees: Any = None
    rows: int = 0
    lacking: str = ""
    """Package without which nothing was learned of enough measurements."""

    @property
    def ranking(self) -> str:
        """``learned``, or ``closed form`` alone."""
        return "closed form" if self.trees is None else "learned"

    def scores(self, found: Predicted) -> Array:
        """Logarithms of times, up to a number that all schedules of a product share."""
        prior = np.log(found.cycles)
        return prior if self.trees is None else prior + self.trees.predict(found.features)


def learned(seen: Sequence[Seen]) -> CostModel:
    """The closed form corrected by measurements; by itself where there are few, or where scikit-learn is not installed.

    Trees predict $\\log(t / c)$ less its median over the schedules of a product, of $t$ seconds and $c$ cycles: what
    a product takes as a whole says nothing of the order of its schedules.
    """
    rows = sum(len(each.seconds) for each in seen)
    if rows < LEAST:
        return CostModel()
    try:
        from sklearn.ensemble import ExtraTreesRegressor  # type: ignore[import-untyped]
    except ImportError:
        return CostModel(lacking="scikit-learn")
    missed = []
    for each in seen:
        ratio = np.log(each.seconds / each.cycles)
        missed.append(ratio - np.median(ratio))
    trees = ExtraTreesRegressor(n_estimators=TREES, min_samples_leaf=2, max_features=0.5, random_state=0, n_jobs=1)
    trees.fit(np.concatenate([each.features for each in seen]), np.concatenate(missed))
    return CostModel(trees=trees, rows=rows)
