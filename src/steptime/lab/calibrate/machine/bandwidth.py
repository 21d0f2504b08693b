"""The bandwidth of memory from copies: which sizes tell it past the last cache, and what they leave unknown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from steptime.errors import UserError
from steptime.lab.calibrate.machine.host import Host
from steptime.lab.calibrate.machine.runner import Measured
from steptime.lab.calibrate.machine.torch_ops import copies_of, room_bytes
from steptime.lab.calibrate.machine.work import MAPS, work_of

#: Operators that stream two tensors and compute next to nothing.
STREAMS: Final = ("copy", "update")
#: A sweep over this many times the last cache, again and again, finds nothing of itself in it.
PAST: Final = 1.5
#: A last cache is taken to be at most this many times as fast as memory; assumed, between the 2 to 4 of server CPUs.
CACHE_SPEEDUP: Final = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Bandwidth of memory, and how sure it is."""

    best_Bps: float
    """Of the best copy."""
    sustained: float
    """Share of it that copies and updates sustain, 0 to 1."""
    factor: float = 1.0
    """The true bandwidth may be lower by this; 1: a sweep past the cache was measured."""
    note: str = ""
    """What is unknown."""


def held_factor(swept_bytes: float, cache_bytes: float) -> float:
    r"""How much too high the bandwidth of a repeated sweep may be because a cache holds part of what it passes.

    $$f = \frac{1}{1 - C / S} \text{ but at most } f_{max}, \qquad f = 1 \text{ for } S \ge 1.5\,C$$

    A cache of $C$ = ``cache_bytes`` holds at most the share $C / S$ of a sweep over $S$ = ``swept_bytes``, so at least
    the rest came from memory in the measured time; $f_{max}$ = :data:`CACHE_SPEEDUP`.

    >>> held_factor(3e9, 1e9), held_factor(1.25e9, 1e9), held_factor(0.5e9, 1e9)
    (1.0, 4.0, 4.0)
    >>> round(held_factor(1.4e9, 1e9), 2)
    3.5
    """
    if swept_bytes >= PAST * cache_bytes:
        return 1.0
    return min(CACHE_SPEEDUP, 1 / max(1 - cache_bytes / swept_bytes, 1 / CACHE_SPEEDUP))


def bandwidth_of(host: Host, operators: Sequence[Measured]) -> Bandwidth:
    """Best and sustained bandwidth of the copies and updates that move more than the last cache holds.

    Where no copy does, those that sweep the most memory, all their sets of operands together, stand for them.

    Raises:
        UserError: no copy was measured.
    """
    found = [(one, work_of(one.task).moved_bytes) for one in operators if one.task.kind in STREAMS]
    if not any(one.task.kind == "copy" for one, _ in found):
        raise UserError(
            "no copy was measured: the memory bandwidth is unknown", hint="--resume measures what is missing"
        )
    past = [(one, moved) for one, moved in found if swept_bytes(host, one) >= PAST * host.cache_bytes]
    chosen = [(one, moved) for one, moved in past if moved > host.cache_bytes]
    if not any(one.task.kind == "copy" for one, _ in chosen):
        most = max(swept_bytes(host, one) for one, _ in found if one.task.kind == "copy")
        chosen = [(one, moved) for one, moved in found if swept_bytes(host, one) >= most / 2]
    copies = [(moved / one.seconds, swept_bytes(host, one)) for one, moved in chosen if one.task.kind == "copy"]
    best_Bps = max(Bps for Bps, _ in copies)
    share = float(np.median([moved / one.seconds for one, moved in chosen])) / best_Bps
    swept = max(swept for _, swept in copies)
    factor = held_factor(swept, host.cache_bytes)
    note = "" if factor == 1 else (
        f"memory bandwidth: the largest copies swept {swept / 1e6:,.0f} MB and the last cache holds "
        f"{host.cache_bytes / 1e6:,.0f} MB of them: the true bandwidth may be up to {factor:.1f} times lower"
    )  # fmt: skip
    return Bandwidth(best_Bps=best_Bps, sustained=min(1.0, max(1e-3, share)), factor=factor, note=note)


def swept_bytes(host: Host, one: Measured) -> float:
    """Memory that the calls of a copy or an update go through before they come back to the first set of operands."""
    moved = work_of(one.task).moved_bytes
    return 2 * moved / MAPS[one.task.kind].passes * copies_of(one.task, host.cache_bytes, room_bytes(host.memory_bytes))
