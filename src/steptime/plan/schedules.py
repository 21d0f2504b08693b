"""Pipeline schedules as a table: what each takes out of the bubble, and what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from steptime.num import Num, ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule whose step and memory have a closed form."""

    name: str
    fills: float = 0.0
    """Passes for gradients of weights that fill the bubble, per stage but one; 0: backward passes are whole."""
    depths: float = 0.0
    """Every stage holds at most $d\\,p - (d - 1)$ micro-batches for $d$ of these; 0: fewer on later stages, as 1F1B."""
    mirrored: bool = False
    """Half of the micro-batches run from the last rank to the first: rank $r$ of $p$ holds stages $r$ and $p-1-r$."""


_ROWS = (
    Schedule(name="1f1b"),
    Schedule(name="interleaved"),
    Schedule(name="zb-h1", fills=1.0, depths=1.0),
    Schedule(name="zb-h2", fills=2.0, depths=2.0),
    Schedule(name="dualpipe", mirrored=True),
)
#: Schedule by name; 1F1B and interleaved: Narayanan et al., arXiv 2104.04473; ZB-H1 and ZB-H2: Qi et al., arXiv
#: 2401.10241, table 1: bubbles of $(p-1)(T_F + T_B - T_W)$ and $(p-1)(T_F + T_B - 2 T_W)$, activations of $p$ and
#: $2p - 1$ micro-batches; DualPipe: arXiv 2412.19437, section 3.2.1.
SCHEDULES: Mapping[str, Schedule] = {row.name: row for row in _ROWS}
ZERO_BUBBLE = tuple(name for name, row in SCHEDULES.items() if row.fills)
"""Schedules that fill their bubble with gradients of weights."""
SPLIT = tuple(name for name, row in SCHEDULES.items() if row.fills or row.mirrored)
"""Schedules that part the backward pass in two."""


def virtual_stage(layers: Num, stages: Num, virtual_stages: Num) -> tuple[Num, Num]:
    r"""Layers of one virtual stage, and how many the first and the last of them lack together.

    $$k = \left\lceil \frac{L}{p\,v} \right\rceil, \qquad d = p\,v\,k - L$$

    where $L$ = `layers`, $p$ = `stages`, $v$ = `virtual_stages` of each. Embedding and head take the places of the
    layers that lack (:func:`equal_but_for_ends`).

    Source: Megatron-Core, `--account-for-embedding-in-pipeline-split`, `--account-for-loss-in-pipeline-split` and
    `--pipeline-model-parallel-layout`.

    >>> virtual_stage(126, 16, 4), virtual_stage(61, 4, 4), virtual_stage(128, 16, 4)
    ((2, 2), (4, 3), (2, 0))
    """
    each = ceil_div(layers, stages * virtual_stages)
    return each, stages * virtual_stages * each - layers


def equal_but_for_ends(each: Num, lacking: Num) -> Any:
    """Whether virtual stages of so many layers are equal but for the first and the last, which lack all that does.

    >>> equal_but_for_ends(4, 3), equal_but_for_ends(1, 3)
    (True, False)
    """
    return lacking <= 2 * each
