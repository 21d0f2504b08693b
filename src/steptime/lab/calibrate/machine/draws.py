"""Random sizes of what is measured, spread evenly over their logarithms."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator


def log_uniform(draw: random.Random, low: float, high: float) -> float:
    """A number whose logarithm is uniform between those of two others."""
    return math.exp(draw.uniform(math.log(low), math.log(high)))


def log_spaced(draw: random.Random, low: float, high: float, count: int) -> Iterator[float]:
    """Numbers with the same ratio from each to the next, every one up to a fifth of that away from its place."""
    start, end = math.log(low), math.log(high)
    for i in range(count):
        yield math.exp(start + (end - start) * (i + draw.uniform(-0.2, 0.2)) / (count - 1))
