"""Rounds in which the blocks of a kernel pass over the processors of a device."""

from __future__ import annotations

from steptime.num import Num, ceil


def quantised_waves(tiles: Num, sm_count: Num, quantisation: Num) -> Num:
    r"""Rounds that the tiles take, between the even share and whole rounds.

    $$w = f + q (\lceil f \rceil - f), \quad f = T / S$$

    where $T$ = `tiles`, $S$ = `sm_count` and $q$ = `quantisation` is 1 for hard rounds and 0 for work that is
    spread evenly.

    Source: NVIDIA, matrix multiplication background user's guide, wave quantisation.

    >>> quantised_waves(15, 10, 1.0), quantised_waves(15, 10, 0.5)
    (2.0, 1.75)
    """
    share = tiles / sm_count
    return share + quantisation * (ceil(share) - share)


def wave_factor(blocks: Num, sm_count: Num, tail: Num) -> Num:
    r"""Time of blocks that pass in rounds, over that of the same work spread evenly.

    $$\omega = 1 + \theta \left(\frac{\lceil B / S \rceil}{B / S} - 1\right)$$

    where $B$ = `blocks`, $S$ = `sm_count` and $\theta$ = `tail` in [0, 1] says how much of the last, partly filled
    round is lost: `quantised_waves` over $B / S$.

    Source: as `quantised_waves`.

    >>> wave_factor(50, 100, 1.0), wave_factor(150, 100, 0.75), wave_factor(200, 100, 1.0)
    (2.0, 1.25, 1.0)
    """
    return quantised_waves(blocks, sm_count, tail) / (blocks / sm_count)
