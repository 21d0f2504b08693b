"""The cost model: the closed form with a correction learned from measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from steptime.num import Array
from steptime_lab.hierarchy.tune.prior import Predicted

LEAST: Final = 8
"""Fewest measurements from which a correction is learned."""
TREES: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Measured schedules of one product."""

    features: Array
    cycles: Array
    """Cycles by the closed form."""
    seconds: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Ranking of schedules: the logarithm of the closed form, plus a correction learned by trees."""

    trees: Any = None
    rows: int = 0
    missing_package: str = ""
    """Package that is needed to learn a correction and is not installed; empty where no correction was due."""

    @property
    def ranking(self) -> str:
        """``learned`` or ``closed form``."""
        return "closed form" if self.trees is None else "learned"

    def scores(self, found: Predicted) -> Array:
        """Logarithms of times, up to a constant that all schedules of a product share."""
        prior = np.log(found.cycles)
        return prior if self.trees is None else prior + self.trees.predict(found.features)


def learned(seen: Sequence[Seen]) -> CostModel:
    """The closed form corrected by measurements; uncorrected where there are few, or scikit-learn is not installed.

    Trees predict $\\log(t / c)$ less its median over the schedules of a product, for $t$ seconds and $c$ cycles: an
    error that all schedules of a product share does not change their order.
    """
    rows = sum(len(each.seconds) for each in seen)
    if rows < LEAST:
        return CostModel()
    try:
        from sklearn.ensemble import ExtraTreesRegressor  # type: ignore[import-untyped]
    except ImportError:
        return CostModel(missing_package="scikit-learn")
    residuals = []
    for each in seen:
        ratio = np.log(each.seconds / each.cycles)
        residuals.append(ratio - np.median(ratio))
    trees = ExtraTreesRegressor(n_estimators=TREES, min_samples_leaf=2, max_features=0.5, random_state=0, n_jobs=1)
    trees.fit(np.concatenate([each.features for each in seen]), np.concatenate(residuals))
    return CostModel(trees=trees, rows=rows)
