"""Candidate layouts of devices (nested groups, rails), and how well each explains the distances."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from steptime.measure.mesh.groups import (
    LARGE,
    Tree,
    group_sums,
    log_partitions,
    partition,
    row_sums,
)
from steptime.num import Array, divisors
from steptime.registry import needed

#: Log-normal spread of the links of one level that is expected before anything is seen, and its weight in links.
PRIOR_SIGMA = 0.12
PRIOR_LINKS = 8.0
#: Range of the logarithm of the factor between two levels, before anything is seen: 1.25 to 10.
GAP_RANGE = math.log(10 / 1.25)
#: Largest groups whose links are summed directly.
SMALL_GROUP = 64
#: Evidence below which a split is rejected: odds of five to two.
LEAST_EVIDENCE = 0.9
#: Largest weight (in links) of the spread that other levels show.
MOST_PRIOR_LINKS = 20.0
#: Levels whose costs differ by less than the first are one level, however certain the difference; a difference
#: above the second counts whatever the noise; between them it has to be twice the noise of a link.
LEAST_RATIO = 1.08
CLEAR_RATIO = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Prior of the spread of links of one level."""

    sigma: float = PRIOR_SIGMA
    links: float = PRIOR_LINKS
    averaged: int = 1
    """Devices on each side whose links were averaged to one; `sigma` is the spread of the averages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Groups of one size inside blocks."""

    group: int
    members: Array
    """Devices by block, group and place."""
    gap: float
    """Difference of the mean log cost of links between groups and within."""
    evidence: float
    """Logarithm of the odds for this split against none."""
    sigma: float
    """Spread of links within each side of the split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Nested groups: sizes from inner to outer, without 1 and without all devices."""

    sizes: tuple[int, ...]
    order: Array
    """Devices so ordered that every group is contiguous: shape ``(blocks, devices of a block)``."""
    evidence: tuple[float, ...]
    """Evidence of each size, as in `Split`."""
    doubts: tuple[float, ...]
    """Evidence of the best rejected split at every place where one was sought."""


def log_odds(one: float, two: float, inside: float, between: float, noise: Noise) -> float:
    r"""Evidence for two levels of links against one, apart from how the devices were grouped.

    $$\frac{n + \nu}{2} \ln \frac{Q_1 + \nu s^2}{Q_2 + \nu s^2}
      - \ln \max\Big(1, \frac{R}{\sigma \sqrt{2 \pi (1/n_i + 1/n_b)}}\Big), \qquad
      \sigma^2 = \frac{Q_2 + \nu s^2}{n + \nu}$$

    with $Q$ the sums of squares around the means (`one`, `two`), $n = n_i + n_b$ links `inside` and `between` groups,
    and a prior of $\nu$ links with spread $s$ (`noise`). The last term pays for the freedom to choose the gap: before
    the measurement its logarithm was somewhere in a range $R$ = :data:`GAP_RANGE`, afterwards its standard error is
    known.
    """
    links = inside + between
    prior = noise.links * noise.sigma**2
    sigma = math.sqrt((two + prior) / (links + noise.links))
    freedom = GAP_RANGE / (sigma * math.sqrt(2 * math.pi * (1 / inside + 1 / between)))
    return (links + noise.links) / 2 * math.log((one + prior) / (two + prior)) - math.log(max(freedom, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    """All links inside some blocks."""

    links: float
    total: float
    squares: float
    """Sum of squares around the mean."""


def _whole(distances: Array, blocks: Array) -> _Whole:
    total = squares = 0.0
    for block in blocks:
        inner = distances if len(block) == len(distances) else distances[block][:, block]
        total += float(inner.sum(dtype=np.float64)) / 2
        squares += float(np.einsum("ij,ij->", inner, inner, dtype=np.float64)) / 2
    links = len(blocks) * blocks.shape[1] * (blocks.shape[1] - 1) / 2
    return _Whole(links=links, total=total, squares=max(squares - total**2 / links, 0.0))


def _inside(distances: Array, groups: Array) -> float:
    """Sum of the links inside groups, which together are all devices."""
    if groups.shape[1] <= SMALL_GROUP:
        return float(distances[groups[:, :, None], groups[:, None, :]].sum(dtype=np.float64)) / 2
    label = np.empty(groups.size, dtype=np.int64)
    label[groups] = np.arange(len(groups))[:, None]
    sums = group_sums(distances, label, len(groups))
    return float(sums[label, np.arange(len(label))].sum(dtype=np.float64)) / 2


def _split(distances: Array, members: Array, whole: _Whole, noise: Noise) -> Split:
    """Means and evidence of a given partition."""
    blocks, count, group = members.shape
    inside = _inside(distances, members.reshape(-1, group))
    n_in = blocks * count * group * (group - 1) / 2
    n_out = whole.links - n_in
    gap = (whole.total - inside) / n_out - inside / n_in
    left = max(whole.squares - n_in * n_out / whole.links * gap**2, 0.0)
    gain = log_odds(whole.squares, left, n_in, n_out, noise)
    gain -= blocks * log_partitions(count * group, group)
    sigma = math.sqrt((left + noise.links * noise.sigma**2) / (whole.links + noise.links))
    return Split(group=group, members=members, gap=gap, evidence=gain, sigma=sigma)


def best_split(distances: Array, blocks: Array, noise: Noise) -> Split | None:
    """The size of group with the most evidence; None if the blocks have no proper divisor."""
    length = blocks.shape[1]
    sizes = divisors(length)[1:-1]
    tree = Tree(distances) if len(blocks) == 1 and length == len(distances) and sizes else None
    if tree is not None:
        blocks = np.arange(length)[None]
    whole = _whole(distances, blocks) if sizes else _Whole(links=0.0, total=0.0, squares=0.0)
    found = [_split(distances, partition(distances, blocks, size, tree), whole, noise) for size in sizes]
    found = [
        replace(s, evidence=s.evidence if s.gap > least_gap(s.sigma * noise.averaged) else -math.inf) for s in found
    ]
    return max(found, key=lambda s: s.evidence, default=None)


def least_gap(sigma: float) -> float:
    """Smallest difference of mean log cost that makes two levels.

    >>> round(math.exp(least_gap(0.01)), 2), round(math.exp(least_gap(0.5)), 2)
    (1.08, 1.25)
    """
    return max(math.log(LEAST_RATIO), min(math.log(CLEAR_RATIO), 2 * sigma))


def find_chain(distances: Array, blocks: Array, noise: Noise | None = None) -> Chain:
    """Nested groups of blocks: the best split, then the same inside its groups and between them."""
    noise = noise or Noise()
    split = best_split(distances, blocks, noise)
    if split is None:
        return Chain(sizes=(), order=blocks, evidence=(), doubts=())
    if split.evidence <= LEAST_EVIDENCE:
        return Chain(sizes=(), order=blocks, evidence=(), doubts=(split.evidence,))
    groups = split.members.reshape(-1, split.group)
    units, between = _units(distances, groups)
    seen = _noise_between(distances, groups, len(blocks), noise)
    coarse = replace(seen, sigma=seen.sigma / split.group, averaged=noise.averaged * split.group)
    outer = find_chain(units, between.reshape(len(blocks), -1), coarse)
    inner = find_chain(distances, groups, seen)
    order = inner.order[outer.order.reshape(-1)].reshape(len(blocks), -1)
    return Chain(
        sizes=(*inner.sizes, split.group, *(split.group * size for size in outer.sizes)),
        order=order,
        evidence=(*inner.evidence, split.evidence, *outer.evidence),
        doubts=(*inner.doubts, *outer.doubts),
    )


def _noise_between(distances: Array, groups: Array, blocks: int, noise: Noise) -> Noise:
    """Spread of the links between two groups of a block around their mean, pooled over all such pairs of groups."""
    size = groups.shape[1]
    order = groups.reshape(-1)
    if len(order) > LARGE or size == 1:
        return noise
    means, _ = _units(distances, groups)
    rest = np.square(distances[np.ix_(order, order)] - np.kron(means, np.ones((size, size))))
    place = np.arange(len(order))
    length = len(order) // blocks
    between = (place[:, None] // length == place[None] // length) & (place[:, None] // size != place[None] // size)
    pairs = np.count_nonzero(between) / 2
    free = pairs * (1 - 1 / size**2)
    squares = float(rest[between].sum()) / 2
    links = min(free, MOST_PRIOR_LINKS)
    sigma = math.sqrt(squares / free)
    weight = noise.links + links
    pooled = math.sqrt((noise.links * noise.sigma**2 + links * sigma**2) / weight)
    return replace(noise, sigma=pooled, links=weight)


def _units(distances: Array, groups: Array) -> tuple[Array, Array]:
    """Mean distances between groups, and the groups' numbers."""
    order, size = groups.reshape(-1), groups.shape[1]
    sizes = np.full(len(groups), size)
    rows = row_sums(distances[order], sizes)
    means = row_sums(rows.T[order], sizes) / size**2
    np.fill_diagonal(means, 0.0)
    return means, np.arange(len(groups))


#: Rows of the matrix that are processed together.
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
        layout=layout,
        links=links,
        means=means,
        squares=left,
        sigma=math.sqrt(spread),
        score=score - layout.log_assignments,
    )


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


#: Rounds in which every group is compared with all others.
ROUNDS = 6


def with_rails(nested: Fit, distances: Array, observed: float = 1.0) -> Fit | None:
    """The nested groups with rails between them, if the distances support rails.

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
    if best is None or best.score - nested.score <= LEAST_EVIDENCE:
        return None
    # Rails have to be faster than the links across them on the first axis that they span.
    axis = best.layout.rail_axis or 0
    gap = best.means[axis] - best.means[axis + len(layout.shape)]
    return best if gap > least_gap(best.sigma) else None


def _lined_up(rest: Array, groups: Array) -> tuple[Array, float]:
    """Orders the members of every group so that equal places have the smallest distances.

    Returns:
        The groups in order, and how much less the links between equal places cost than others.
    """
    assign = needed("scipy.optimize", "finding a mesh").linear_sum_assignment
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
