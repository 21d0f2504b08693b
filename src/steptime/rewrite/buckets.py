"""Buckets of lengths to which inputs are padded: padding, compilations, and the exact best buckets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from steptime.errors import UserError, shorten

MOST_LENGTHS: Final = 100_000
LONGEST: Final = 10**7


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Lengths to which inputs are padded, and their cost."""

    tops: tuple[int, ...]
    padding: float
    """Padded over real tokens, minus one."""
    step_time_s: float
    """Expected time of a step."""
    compilations: float
    """Expected compilations in the given number of steps: one for each bucket that occurs."""
    total_s: float
    """Seconds of a step with its share of the compilations."""


Time = Callable[[int], float]


def parse_lengths(text: str) -> dict[int, float]:
    """Parse lengths and shares such as ``128=0.5,512=0.5``; shares are scaled to a sum of 1.

    Raises:
        UserError: the text has another form.

    >>> parse_lengths("128=1,512=3")
    {128: 0.25, 512: 0.75}
    """
    found: dict[int, float] = {}
    for part in text.replace("\\n", ",").split(","):
        if not part.strip():
            continue
        length, _, share = part.partition("=")
        try:
            size, weight = int(length), float(share or 1)
        except ValueError:
            raise UserError(f"--lengths {shorten(part)!r} is no length and share", hint="for example 128=0.5") from None
        if not 0 < size <= LONGEST or not (0 <= weight < math.inf):
            raise UserError(f"--lengths {shorten(part)!r} is out of range", hint=f"lengths from 1 to {LONGEST}")
        found[size] = found.get(size, 0.0) + weight
    total = math.fsum(found.values())
    if not total or len(found) > MOST_LENGTHS:
        raise UserError("--lengths has no length with a share", hint="for example 128=0.5,512=0.5")
    return {size: found[size] / total for size in sorted(found)}


def powers_of_two(lengths: Mapping[int, float], least: int = 16) -> tuple[int, ...]:
    """The powers of two to which the lengths are rounded up.

    >>> powers_of_two({100: 0.5, 130: 0.5})
    (128, 256)
    """
    return tuple(sorted({max(least, 1 << (length - 1).bit_length()) for length in lengths}))


def cost_of(
    tops: Sequence[int], lengths: Mapping[int, float], time_s: Time, *, steps: int, compile_s: float
) -> Buckets:
    r"""Cost of a set of buckets.

    $$T = \sum_l p_l\,t(\lceil l \rceil), \qquad
      C = \sum_b \Bigl(1 - \bigl(1 - \textstyle\sum_{l \in b} p_l\bigr)^{n}\Bigr)$$

    where $p_l$ = share of length $l$, $t$ = time of a step (s) at the bucket's length $\lceil l \rceil$, $C$ =
    expected compilations in $n$ = ``steps`` steps. Source: definition; a bucket is compiled when it first occurs.

    >>> found = cost_of((128, 512), {100: 0.5, 512: 0.5}, lambda n: n / 1e6, steps=100, compile_s=0.0)
    >>> round(found.padding, 4), round(found.step_time_s * 1e6, 1), round(found.compilations, 3)
    (0.0458, 320.0, 2.0)
    """
    ordered = sorted(tops)
    shares = dict.fromkeys(ordered, 0.0)
    for length, share in lengths.items():
        top = next((each for each in ordered if each >= length), None)
        if top is None:
            raise UserError(f"no bucket holds a length of {length}", hint=f"the largest is {ordered[-1]}")
        shares[top] += share
    used = [top for top in ordered if shares[top]]
    real = math.fsum(length * share for length, share in lengths.items())
    padded = math.fsum(top * shares[top] for top in used)
    step_s = math.fsum(time_s(top) * shares[top] for top in used)
    compilations = math.fsum(1.0 - (1.0 - min(shares[top], 1.0)) ** steps for top in used)
    return Buckets(
        tops=tuple(used),
        padding=padded / real - 1.0,
        step_time_s=step_s,
        compilations=compilations,
        total_s=step_s + compilations * compile_s / steps,
    )


def best_buckets(
    lengths: Mapping[int, float], most: int, time_s: Time, *, steps: int, compile_s: float
) -> tuple[Buckets, ...]:
    r"""The best set of each number of buckets up to ``most``, by dynamic programming over the lengths.

    $$F_k(j) = \min_{i < j} F_{k-1}(i) + P_{ij}\,t(l_j) + \bigl(1 - (1 - P_{ij})^n\bigr)\,c / n$$

    where $P_{ij}$ is the share of the lengths after $l_i$ up to $l_j$, $t$ the time of a step (s), $n$ the number of
    steps and $c$ the time of a compilation (s). A best bucket ends at a length that occurs, since the time does not
    fall with the length; so the minimum is exact.

    Args:
        lengths: length -> share, which add up to 1.
        most: largest number of buckets.
        time_s: time of a step at a length.
        steps: steps over which compilations are spread.
        compile_s: time of one compilation.
    """
    sizes = sorted(length for length, share in lengths.items() if share)
    sums = [0.0]
    for size in sizes:
        sums.append(sums[-1] + lengths[size])
    times = [time_s(size) for size in sizes]
    count = len(sizes)
    costs = [0.0, *(math.inf for _ in sizes)]
    back: list[list[int]] = []
    out: list[Buckets] = []
    for _ in range(min(most, count)):
        after, chosen = [math.inf] * (count + 1), [0] * (count + 1)
        for j in range(1, count + 1):
            for i in range(j):
                share = sums[j] - sums[i]
                more = share * times[j - 1] + (1.0 - max(1.0 - share, 0.0) ** steps) * compile_s / steps
                if costs[i] + more < after[j]:
                    after[j], chosen[j] = costs[i] + more, i
        costs = after
        back.append(chosen)
        tops, j = [], count
        for choices in reversed(back):
            tops.append(sizes[j - 1])
            j = choices[j]
        out.append(cost_of(tops, lengths, time_s, steps=steps, compile_s=compile_s))
    return tuple(out)
