"""Nested groups: which sizes of group explain the distances, and how much better than no groups at all."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from steptime.lab.calibrate.mesh.groups import LARGE, Tree, group_sums, log_partitions, partition, row_sums
from steptime.num import Array, divisors

#: Log-normal spread of the links of one level that is expected before anything is seen, and its weight in links.
PRIOR_SIGMA = 0.12
PRIOR_LINKS = 8.0
#: Range of the logarithm of the factor between two levels, before anything is seen: 1.25 to 10.
GAP_RANGE = math.log(10 / 1.25)
#: Up to here groups are looked at one by one.
SMALL_GROUP = 64
#: Evidence below which a split is turned down: odds of five to two.
LEAST_EVIDENCE = 0.9
#: Most weight (links) of what other levels show of the spread.
MOST_PRIOR_LINKS = 20.0
#: Levels whose costs differ by less than the first are one level, however certain the difference; a difference
#: above the second counts whatever the noise; between them it has to be twice the noise of a link.
LEAST_RATIO = 1.08
CLEAR_RATIO = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What is known of the spread of links of one level."""

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
    """Of each size, as in `Split`."""
    doubts: tuple[float, ...]
    """Evidence of the best split that was turned down at every place where one was looked for."""


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
    """Means and evidence of a partition that is given."""
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
    """Spread of the links between two groups of a block, over all such pairs of groups: all that is no level."""
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
