"""Rails: links between groups that are faster where both ends have the same place in their group."""

from __future__ import annotations

import math

import numpy as np

from steptime.calibrate.mesh.hierarchy import LEAST_EVIDENCE, least_gap
from steptime.calibrate.mesh.layout import Fit, Layout, fit, residual
from steptime.calibrate.mesh.optional import scipy_module
from steptime.num import Array

#: Rounds in which every group is compared with all others.
ROUNDS = 6


def with_rails(nested: Fit, distances: Array, observed: float = 1.0) -> Fit | None:
    """The same groups with rails between them, where the distances speak for it.

    Every boundary of the nested groups is tried; a layout with rails has to explain the distances better by more
    than the number of ways to line the groups up, and rails have to be faster by more than noise.

    Returns:
        The best layout with rails; None if there is none.
    """
    layout = nested.layout
    rest = residual(nested, distances)
    found = []
    for axis in range(1, len(layout.shape)):
        inside = math.prod(layout.shape[:axis])
        groups = _lined_up(rest, layout.order.reshape(-1, inside))
        freedom = layout.log_assignments + (len(groups) - 1) * math.lgamma(inside + 1)
        railed = Layout(
            kind="rails", shape=layout.shape, order=groups.reshape(-1), rail_axis=axis, log_assignments=freedom
        )
        found.append(fit(railed, distances, observed))
    best = max(found, key=lambda f: f.score, default=None)
    if best is None or best.score - nested.score <= LEAST_EVIDENCE or not _faster(best):
        return None
    return best


def _faster(railed: Fit) -> bool:
    """Whether rails are faster than the links across them on the first axis that they span."""
    axis = railed.layout.rail_axis or 0
    gap = railed.means[axis] - railed.means[axis + len(railed.layout.shape)]
    return bool(gap > least_gap(railed.sigma))


def _lined_up(rest: Array, groups: Array) -> Array:
    """Orders the members of every group so that equal places have the smallest distances."""
    count, size = groups.shape
    assign = scipy_module("scipy.optimize").linear_sum_assignment
    groups = groups.copy()
    for i in range(1, count):
        cost = rest[np.ix_(groups[i], groups[:i].reshape(-1))].reshape(size, i, size).sum(axis=1)
        _, place = assign(cost)
        groups[i] = groups[i][np.argsort(place)]
    for _ in range(ROUNDS):
        order = groups.reshape(-1)
        total = rest[order].reshape(len(order), -1)[:, order].reshape(len(order), count, size)
        sums = total.sum(axis=1).reshape(count, size, size)
        own = total.reshape(count, size, count, size)[np.arange(count), :, np.arange(count), :]
        changed = False
        for i in range(count):
            _, place = assign(sums[i] - own[i])
            if not np.array_equal(place, np.arange(size)):
                groups[i] = groups[i][np.argsort(place)]
                changed = True
        if not changed:
            break
    return groups
