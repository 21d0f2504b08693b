"""One setting that a measured run may have had."""

from __future__ import annotations

from dataclasses import dataclass

from steptime.lab.measured.canonical import Recomputation
from steptime.lab.measured.degrees import Degrees


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One setting that agrees with all that the row states."""

    weight: float
    """Share of belief; the weights of a run sum to 1."""
    precision: str
    degrees: Degrees
    """With ``vpp`` and ``ep`` filled in."""
    micro_batch: int
    recompute: Recomputation
    zero: int
    shard_ranks: int
    """Ranks that share out what the ZeRO stage names; of the dp x cp ranks."""
    sequence_parallel: bool
    attention: str
    """``fused`` or ``unfused``."""
    offload: frozenset[str] = frozenset()
    """What is kept on the host, beside what the row says."""
    hides_data: bool = True
    """Gradients and weights travel behind computation where the framework hides them, or nobody knows what it does."""
    fits: bool = True
    """The predicted memory is below that of the device."""
