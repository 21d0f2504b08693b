"""A predicted placement beside a measured memory snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steptime.captured.formats.memory_snapshot import memory_snapshot
from steptime.captured.formats.snapshot_reader import UNKNOWN, DeviceMemory, parse_snapshot
from steptime.captured.graph.placement import Placement

#: Names of categories in snapshots that PyTorch's profiler writes -> ours.
_OURS = {"optimizer_state": "state", "autograd_detail": "temporary"}


@dataclass(frozen=True, slots=True)
class Difference:
    """One size, predicted and measured."""

    name: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def relative(self) -> float | None:
        """(predicted - measured) / measured; None where nothing was measured.

        >>> Difference("peak", 90, 100).relative
        -0.1
        """
        return (self.predicted_bytes - self.measured_bytes) / self.measured_bytes if self.measured_bytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotComparison:
    """Sizes of a device, predicted and measured."""

    totals: tuple[Difference, ...]
    """Peak reserved, allocated and requested, and what is in use at the end; both sides computed alike."""
    by_category: tuple[Difference, ...]
    """Requested bytes at the peak; empty where the measured snapshot does not say what its blocks hold."""
    predicted: DeviceMemory
    measured: DeviceMemory


def compare_snapshot(
    placement: Placement, measured: DeviceMemory, *, workspaces: Sequence[int] = ()
) -> SnapshotComparison:
    """Compare a placement with one device of a measured snapshot.

    The prediction is written as a snapshot and read like the measured one, so that both have the same definitions.

    Args:
        placement: storages as the caching allocator places them.
        measured: one device of a snapshot.
        workspaces: sizes in bytes of what lies beside them from the first product on, as cuBLAS's workspaces do.
    """
    document = memory_snapshot(placement, workspaces=workspaces)
    predicted = parse_snapshot(document, placement.program.name).device()
    totals = (
        Difference("peak reserved", predicted.peak_reserved_bytes, measured.peak_reserved_bytes),
        Difference("peak allocated", predicted.peak_allocated_bytes, measured.peak_allocated_bytes),
        Difference("peak requested", predicted.peak_requested_bytes, measured.peak_requested_bytes),
        Difference("in use at the end", predicted.requested_bytes, measured.requested_bytes),
    )
    return SnapshotComparison(
        totals=totals, by_category=_categories(predicted, measured), predicted=predicted, measured=measured
    )


def _categories(predicted: DeviceMemory, measured: DeviceMemory) -> tuple[Difference, ...]:
    known: dict[str, int] = {}
    for name, size in measured.by_category.items():
        ours = _OURS.get(name, name)
        known[ours] = known.get(ours, 0) + size
    if not set(known) - {UNKNOWN}:
        return ()
    names = dict.fromkeys([*predicted.by_category, *known])
    return tuple(Difference(name, predicted.by_category.get(name, 0), known.get(name, 0)) for name in names)
