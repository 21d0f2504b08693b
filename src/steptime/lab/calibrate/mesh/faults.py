"""Links that are slower than their kind, or slower one way than the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from steptime.hardware.records import OddLink
from steptime.lab.calibrate.mesh.layout import Fit, class_medians, residual
from steptime.lab.calibrate.mesh.prepare import Prepared, noise_threshold
from steptime.num import Array

#: A link is odd only if it is slower by more than this, however quiet the others are.
LEAST_FACTOR = 1.5
#: Spread of alike links below which nothing is called quiet.
LEAST_SIGMA = 0.02
#: Standard deviation of normal numbers over the median of their magnitudes.
SPREAD = 1.4826
#: Odd links that are listed; the rest are counted.
MOST_LISTED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What does not fit the mesh."""

    broken: tuple[OddLink, ...]
    asymmetric: tuple[OddLink, ...]
    slow_devices: tuple[str, ...]
    broken_mask: Array
    """Pairs that are broken, of the whole matrix."""
    rest: Array
    """What the mesh leaves unexplained of the pairs that are neither broken nor missing, else zero."""
    sigma: float
    """Robust spread of links about the mean of their kind; at least `LEAST_SIGMA`."""
    noise: float
    """Root mean square of what is left of links that are neither broken nor missing."""
    unlisted: int
    one_sided: float | None
    """Usual factor between the directions of a pair, where most differ."""
    unexplained: float
    """Share of the pairs that are broken, without those of the device that has most of them."""


def find_faults(prepared: Prepared, fitted: Fit, names: Sequence[str]) -> Faults:
    """Compares every link with its class, and with its way back.

    A link is broken if both directions are slower than the median of its class by more than
    $\\max(5, \\sqrt{2 \\ln n} + 1)$ times the robust spread (1.48 median absolute deviations) and by a factor of at
    least 1.5; asymmetric if the two directions differ by as much in terms of their own spread. Where most pairs differ
    by that factor from one direction to the other, all that do are asymmetric.
    """
    count = len(names)
    limit = noise_threshold(count * (count - 1) // 2)
    both = np.nan_to_num(prepared.both_ways)
    rest = residual(replace(fitted, means=class_medians(fitted, both, prepared.missing)), both)
    rest[prepared.missing] = 0.0
    difference = prepared.one_way - prepared.one_way.T
    np.nan_to_num(difference, copy=False)
    least = math.log(LEAST_FACTOR)
    sigma = _spread(rest)
    slow = rest - np.abs(difference) / 2 > max(limit * sigma, least)
    usual = _spread(difference)
    most = usual > SPREAD * least
    uneven = difference > (least if most else max(limit * usual, least))
    broken = _listed(np.triu(slow, 1), rest, names)
    asymmetric = _listed(uneven, difference, names)
    slow_of = slow.sum(axis=1)
    hurt = np.flatnonzero(slow_of > max(2, (count - 1) / 2))
    rest[slow] = 0.0
    left = count * (count - 1) - int(slow_of.sum()) - int(prepared.missing.sum())
    noise = math.sqrt(float(np.square(rest, dtype=np.float64).sum()) / max(left, 1))
    unlisted = int(slow_of.sum()) // 2 + int(uneven.sum()) - len(broken) - len(asymmetric)
    return Faults(
        broken=broken, asymmetric=asymmetric, slow_devices=tuple(names[int(i)] for i in hurt), broken_mask=slow,
        rest=rest, sigma=sigma, noise=noise, unlisted=unlisted, one_sided=math.exp(usual / SPREAD) if most else None,
        unexplained=float(slow_of.sum() - 2 * slow_of.max()) / max((count - 1) * (count - 2), 1),
    )  # fmt: skip


def _spread(values: Array) -> float:
    """Robust standard deviation of the entries off the diagonal."""
    step = max(1, len(values) // 1024)
    some = values[::step]
    some = some[some != 0]
    return max(LEAST_SIGMA, SPREAD * float(np.median(np.abs(some))) if len(some) else 0.0)


def _listed(mask: Array, excess: Array, names: Sequence[str]) -> tuple[OddLink, ...]:
    rows, columns = np.nonzero(mask)
    worst = np.argsort(-excess[rows, columns], kind="stable")[:MOST_LISTED]
    ends = [(int(rows[i]), int(columns[i])) for i in worst]
    return tuple(OddLink(source=names[a], target=names[b], factor=math.exp(float(excess[a, b]))) for a, b in ends)
