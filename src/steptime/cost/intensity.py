"""Arithmetic intensity and what a roofline allows."""

from __future__ import annotations

from steptime.num import Num, minimum


def arithmetic_intensity(flops: Num, moved_bytes: Num) -> Num:
    r"""Operations per byte: $I = F / M$, with $F$ = `flops` and $M$ = `moved_bytes`.

    Source: roofline model, Williams et al. 2009.

    >>> arithmetic_intensity(8e12, 4e9)
    2000.0
    """
    return flops / moved_bytes


def attainable_flops_per_s(intensity: Num, flops_per_s: Num, memory_Bps: Num) -> Num:
    r"""Rate that a device can reach: $\min(R,\ I\,\beta)$.

    where $I$ = `intensity` (FLOP per byte), $R$ = `flops_per_s` and $\beta$ = `memory_Bps`.

    Source: roofline model, Williams et al. 2009.

    >>> attainable_flops_per_s(100.0, 1e15, 2e12), attainable_flops_per_s(1000.0, 1e15, 2e12)
    (200000000000000.0, 1000000000000000.0)
    """
    return minimum(flops_per_s, intensity * memory_Bps)
