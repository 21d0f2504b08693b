"""What many devices cost beyond their work."""

from __future__ import annotations

from steptime.num import Num, log2, maximum

NODE = 8
"""Devices of one node, as a rule: they need no network between them."""


def growth_s(work_s: Num, devices: Num, growth: Num) -> Num:
    r"""What a step takes longer on many devices: the slowest of them, and links that others use too.

    $$t = T\, g \log_2 \max(n / 8, 1)$$

    where $T$ = `work_s` is the time with all devices alike, $n$ = `devices` and $g$ = `growth` per doubling.

    Source: own; the expected maximum of $n$ similar times grows with $\log n$.

    >>> growth_s(2.0, 64, 0.01), growth_s(2.0, 8, 0.01)
    (0.06, 0.0)
    """
    return work_s * growth * log2(maximum(devices, NODE) / NODE)
