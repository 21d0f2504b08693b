"""Candidate layouts of devices on a mesh, and how well each explains the distances."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from steptime.lab.calibrate.mesh.hierarchy import PRIOR_LINKS, PRIOR_SIGMA
from steptime.num import Array

#: Rows of the matrix that are looked at together.
ROWS = 512
#: Rows that medians are taken from, about.
MEDIAN_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Devices on the places of a mesh, and which pairs of places have equal links."""

    kind: str
    """``nested``, ``rails`` or ``torus``."""
    shape: tuple[int, ...]
    """Places along each axis; the first axis counts fastest."""
    order: Array
    """Device on each place."""
    rail_axis: int | None = None
    """First axis across groups with rails: places equal on all axes before it have links of their own."""
    log_assignments: float
    """Logarithm of the number of ways to put the devices on the places that are no mere renaming."""
    evidence: tuple[float, ...] = ()
    """Log odds of every decision that led here against the other choice."""

    @property
    def classes(self) -> int:
        """Number of classes of links."""
        if self.kind == "torus":
            return math.prod(size // 2 + 1 for size in self.shape)
        return len(self.shape) * (2 if self.kind == "rails" else 1)

    def class_rows(self, start: int, stop: int) -> Array:
        """Class of the links from some places to all places.

        Nested: the outermost axis in which two places differ. Rails: that, plus the number of axes if the link
        crosses groups and keeps its rail. Torus: the hops along each axis, as one number.
        """
        places = math.prod(self.shape)
        rows, columns = np.arange(start, stop)[:, None], np.arange(places)[None]
        out = np.zeros((stop - start, places), dtype=np.int32)
        stride, scale = 1, 1
        for axis, size in enumerate(self.shape):
            a, b = rows // stride % size, columns // stride % size
            if self.kind == "torus":
                apart = np.abs(a - b)
                out += scale * np.minimum(apart, size - apart).astype(np.int32)
                scale *= size // 2 + 1
            else:
                out[a != b] = axis
            stride *= size
        if self.kind == "rails" and self.rail_axis is not None:
            inside = math.prod(self.shape[: self.rail_axis])
            out[(out >= self.rail_axis) & (rows % inside == columns % inside)] += len(self.shape)
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Mean log cost of every class of links, and what is left."""

    layout: Layout
    links: Array
    means: Array
    """NaN for a class without links."""
    squares: float
    sigma: float
    score: float
    """Logarithm of the likelihood of the distances, less what the freedom of the layout costs."""


def chunks(layout: Layout, distances: Array) -> Iterator[tuple[slice, Array, Array]]:
    """Places, distances between places and their classes, some rows at a time."""
    count = len(layout.order)
    for start in range(0, count, ROWS):
        rows = slice(start, min(start + ROWS, count))
        yield rows, distances[layout.order[rows]][:, layout.order], layout.class_rows(rows.start, rows.stop)


def fit(layout: Layout, distances: Array, observed: float = 1.0) -> Fit:
    """Fits the mean of every class.

    Args:
        layout: devices on places.
        distances: symmetric log costs, zero on the diagonal.
        observed: share of the pairs that was measured; the others carry no weight.
    """
    count = len(distances)
    size = layout.classes
    links, sums, squares = np.zeros(size), np.zeros(size), 0.0
    for _, block, classes in chunks(layout, distances):
        flat = classes.reshape(-1)
        links += np.bincount(flat, minlength=size)
        sums += np.bincount(flat, weights=block.reshape(-1), minlength=size)
        squares += float(np.square(block, dtype=np.float64).sum())
    links[0] -= count
    links, sums, squares = links / 2, sums / 2, squares / 2
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(links > 0, sums / links, np.nan)
    left = max(squares - float(np.nansum(links * means**2)), 0.0) * observed
    n = observed * count * (count - 1) / 2
    spread = (left + PRIOR_LINKS * PRIOR_SIGMA**2) / (n + PRIOR_LINKS)
    score = -(n + PRIOR_LINKS) / 2 * math.log(spread) - np.count_nonzero(links) / 2 * math.log(max(n, 2))
    return Fit(
        layout=layout, links=links, means=means, squares=left, sigma=math.sqrt(spread),
        score=score - layout.log_assignments,
    )  # fmt: skip


def class_medians(fitted: Fit, distances: Array, missing: Array) -> Array:
    """Median of every class over the measured pairs, in which a slow device has no part; of many devices from a sample.

    Classes without a measured pair keep their means.
    """
    layout, count = fitted.layout, len(fitted.layout.order)
    rows = np.arange(0, count, max(1, count // MEDIAN_ROWS))
    classes = np.concatenate([layout.class_rows(int(row), int(row) + 1) for row in rows])
    block, known = (each[layout.order[rows]][:, layout.order] for each in (distances, ~missing))
    known[np.arange(len(rows)), rows] = False
    found, values = classes[known], block[known]
    order = np.argsort(found, kind="stable")
    names, starts = np.unique(found[order], return_index=True)
    out: Array = fitted.means.copy()
    out[names] = [np.median(part) for part in np.split(values[order], starts[1:])]
    return out


def residual(fitted: Fit, distances: Array) -> Array:
    """Distances less the mean of their class, in the order of the devices; zero on the diagonal."""
    out = np.empty_like(distances)
    order = fitted.layout.order
    for rows, block, classes in chunks(fitted.layout, distances):
        block -= fitted.means[classes].astype(block.dtype)
        out[order[rows][:, None], order[None]] = block
    np.fill_diagonal(out, 0.0)
    return out


def expected(fitted: Fit) -> Array:
    """Mean log cost of the class of every pair, in the order of the devices; zero on the diagonal."""
    count = len(fitted.layout.order)
    return -residual(fitted, np.zeros((count, count), dtype=np.float32))
