"""Static and dynamic metrics of a recorded program."""

from __future__ import annotations

from dataclasses import dataclass

from steptime.captured.cost.table import CostTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What a graph costs: static metrics, and the predicted time."""

    flops: float
    """Operations of the matrix and the vector units."""
    moved_bytes: float
    launches: float
    seconds: float
    """Predicted time of the device."""
    peak_bytes: float = 0.0
    """Largest memory that is alive at once, where somebody has counted it."""


def table_metrics(table: CostTable, *, peak_bytes: float = 0.0) -> Metrics:
    """Metrics of a recorded program; its time is that of the step, with the host."""
    totals = table.totals
    return Metrics(
        flops=totals.executed_flops + totals.vector_flops, moved_bytes=totals.moved_bytes, launches=totals.launches,
        seconds=totals.step_s, peak_bytes=peak_bytes,
    )  # fmt: skip
