"""Sequences of unequal lengths: what padding computes, and how long equal replicas wait for the fullest."""

from __future__ import annotations

from collections.abc import Sequence
from math import erf, exp, fsum, pi, sqrt
from typing import Final

import numpy as np

Shares = Sequence[tuple[float, float]]
"""Values in rising order, each with its share; shares add up to one."""
GRID: Final = 1024
MOST_DRAWS: Final = 256


def mean_of(values: Shares) -> float:
    r"""Mean of a discrete distribution: $\mu = \sum_i p_i x_i$ of `values` $x_i$ with shares $p_i$.

    Source: definition.

    >>> mean_of([(1.0, 0.5), (3.0, 0.5)])
    2.0
    """
    return fsum(value * share for value, share in values)


def spread_of(values: Shares) -> float:
    r"""Standard deviation: $\sigma = \sqrt{\sum_i p_i (x_i - \mu)^2}$ of `values` $x_i$ with shares $p_i$.

    Source: definition.

    >>> spread_of([(1.0, 0.5), (3.0, 0.5)])
    1.0
    """
    mean = mean_of(values)
    return sqrt(fsum(share * (value - mean) ** 2 for value, share in values))


def attended_length(values: Shares) -> float:
    r"""Length of documents of one length with as many pairs per token: $\bar{l} = \sum_i p_i l_i^2 / \sum_i p_i l_i$.

    `values` are lengths $l_i$ with shares $p_i$ of the documents.

    Source: pairs of a document grow with the square of its length.

    >>> attended_length([(1.0, 0.5), (3.0, 0.5)])
    2.5
    """
    return fsum(share * value**2 for value, share in values) / mean_of(values)


def longest_of(values: Shares, count: int) -> list[tuple[float, float]]:
    r"""Distribution of the longest of several: $P(\max = x_i) = F_i^b - F_{i-1}^b$.

    $F_i$ is the share of `values` up to $x_i$, and $b$ = `count` are drawn.

    Source: order statistics of independent draws.

    >>> longest_of([(1.0, 0.5), (3.0, 0.5)], 2)
    [(1.0, 0.25), (3.0, 0.75)]
    """
    out, below, so_far = [], 0.0, 0.0
    for value, share in values:
        below += share
        reached = min(below, 1.0) ** count
        out.append((value, reached - so_far))
        so_far = reached
    return out


def largest_normal(count: int) -> float:
    r"""Expected largest of normal deviates: $e_n = \int x\,n\,\phi(x)\,\Phi(x)^{n-1}\,dx$ of $n$ = `count`.

    Source: order statistics; by the trapezoidal rule from -9 to 9 in steps of 1/200.

    >>> round(largest_normal(1), 6), round(largest_normal(2), 4), round(largest_normal(100), 3)
    (0.0, 0.5642, 2.508)
    """
    step, total = 1 / 200, 0.0
    for n in range(-1800, 1801):
        x = n * step
        total += x * count * exp(-x * x / 2) / sqrt(2 * pi) * (0.5 * (1 + erf(x / sqrt(2)))) ** (count - 1)
    return total * step


def slowest_over_mean(values: Shares, draws: int, replicas: int) -> float:
    r"""Expected sum of the slowest replica over the mean, each of the same number of independent draws.

    $$w = \frac{1}{m \mu} \int \Big(1 - F_m(x)^R\Big)\,dx$$

    where `values` have mean $\mu$, $F_m$ is the distribution of the sum of $m$ = `draws`, the micro-batches of each of
    $R$ = `replicas`: by convolution, on a grid of 1/1,024 of the range of a draw. Sums of more than 256 are taken as
    normal: $w = 1 + \sigma e_R / (\mu \sqrt{m})$ (:func:`largest_normal`).

    Source: order statistics; central limit theorem.

    >>> round(slowest_over_mean([(1.0, 0.5), (3.0, 0.5)], 1, 2), 3), slowest_over_mean([(2.0, 1.0)], 4, 8)
    (1.25, 1.0)
    """
    mean, low, width = mean_of(values), values[0][0], values[-1][0] - values[0][0]
    if width <= 0 or replicas == 1:
        return 1.0
    if draws > MOST_DRAWS:
        return 1.0 + spread_of(values) / mean * largest_normal(replicas) / sqrt(draws)
    steps = GRID * draws + 1
    one = np.zeros(GRID + 1)
    for value, share in values:  # between two points of the grid, so that the mean is kept
        place = (value - low) / width * GRID
        at = min(int(place), GRID - 1)
        one[at] += share * (at + 1 - place)
        one[at + 1] += share * (place - at)
    size = 1 << steps.bit_length()
    summed = np.fft.irfft(np.fft.rfft(one, size) ** draws, size)[:steps]
    below = np.clip(np.cumsum(summed), 0.0, 1.0)
    largest = draws * low + width / GRID * float(np.sum(1.0 - below[:-1] ** replicas))
    return largest / (draws * mean)
