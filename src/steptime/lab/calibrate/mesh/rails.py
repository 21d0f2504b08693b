"""Rails: links between groups that are faster where both ends have the same place in their group."""

from __future__ import annotations

import math

import numpy as np

from steptime.lab.calibrate.mesh.groups import LARGE, group_sums
from steptime.lab.calibrate.mesh.hierarchy import LEAST_EVIDENCE, LEAST_RATIO, least_gap
from steptime.lab.calibrate.mesh.layout import Fit, Layout, fit, residual
from steptime.lab.calibrate.mesh.optional import scipy_module
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
    tried = []
    for axis in range(1, len(layout.shape)):
        inside = math.prod(layout.shape[:axis])
        groups, advantage = _lined_up(rest, layout.order.reshape(-1, inside))
        if advantage >= math.log(LEAST_RATIO) / 2:
            tried.append((advantage, axis, groups))
    found = []
    for _, axis, groups in tried if len(rest) <= LARGE else sorted(tried, key=lambda t: -t[0])[:1]:
        inside = groups.shape[1]
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


def _lined_up(rest: Array, groups: Array) -> tuple[Array, float]:
    """Orders the members of every group so that equal places have the smallest distances.

    Returns:
        The groups in order, and how much less the links between equal places cost than others.
    """
    assign = scipy_module("scipy.optimize").linear_sum_assignment
    count, size = groups.shape
    groups = groups.copy()
    near = rest[groups[0]].copy()
    for i in range(1, count):
        _, device = assign(near[:, groups[i]])
        groups[i] = groups[i][device]
        near += rest[groups[i]]
    for _ in range(ROUNDS):
        changed = False
        for i, group in enumerate(groups):
            _, device = assign(near[:, group] - rest[np.ix_(group, group)])
            if not np.array_equal(device, np.arange(size)):
                groups[i] = group[device]
                changed = True
        label = np.empty(groups.size, dtype=np.int64)
        label[groups] = np.arange(size)
        near = group_sums(rest, label, size)
        if not changed:
            break
    return groups, -float(near[label, np.arange(len(label))].sum()) / (groups.size * (count - 1))
