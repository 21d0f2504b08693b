"""Static and dynamic metrics of a graph, and their weighted sum."""

from __future__ import annotations

from dataclasses import dataclass

from steptime.cost.intensity import weighted_cost
from steptime.estimate.graph.table import CostTable
from steptime.estimate.graph.timing import Timer
from steptime.workload.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What each metric counts in a cost; the default is the predicted time alone."""

    per_flop: float = 0.0
    per_byte: float = 0.0
    per_launch: float = 0.0
    per_peak_byte: float = 0.0
    per_second: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What a graph costs: static metrics, and the predicted time.

    >>> Metrics(flops=10, moved_bytes=4, launches=1, seconds=2.0).cost(Weights(per_byte=1.0, per_second=3.0))
    10.0
    """

    flops: float
    """Operations of the matrix and the vector units."""
    moved_bytes: float
    launches: float
    seconds: float
    """Predicted time of the device."""
    peak_bytes: float = 0.0
    """Largest memory that is alive at once, where somebody has counted it."""

    def cost(self, weights: Weights) -> float:
        """Weighted sum, :func:`steptime.cost.intensity.weighted_cost`."""
        total = weighted_cost(
            self.flops, self.moved_bytes, self.launches, self.peak_bytes, self.seconds, weights.per_flop,
            weights.per_byte, weights.per_launch, weights.per_peak_byte, weights.per_second,
        )  # fmt: skip
        return float(total)

    def __add__(self, other: Metrics) -> Metrics:
        """Of both, one after the other: sums, and the larger peak."""
        return Metrics(
            flops=self.flops + other.flops, moved_bytes=self.moved_bytes + other.moved_bytes,
            launches=self.launches + other.launches, seconds=self.seconds + other.seconds,
            peak_bytes=max(self.peak_bytes, other.peak_bytes),
        )  # fmt: skip


def graph_metrics(graph: Graph, timer: Timer, *, peak_bytes: float = 0.0) -> Metrics:
    """Metrics of a graph of pure nodes on a device."""
    costs = [timer.cost(node) for node in graph.nodes()]
    return Metrics(
        flops=float(sum(cost.work.matrix_flops + cost.work.vector_flops for cost in costs)),
        moved_bytes=float(sum(cost.work.moved_bytes for cost in costs)),
        launches=float(sum(cost.work.launches for cost in costs)),
        seconds=sum(cost.seconds for cost in costs), peak_bytes=peak_bytes,
    )  # fmt: skip


def table_metrics(table: CostTable, *, peak_bytes: float = 0.0) -> Metrics:
    """Metrics of a recorded program; its time is that of the step, with the host."""
    totals = table.totals
    return Metrics(
        flops=totals.executed_flops + totals.vector_flops, moved_bytes=totals.moved_bytes, launches=totals.launches,
        seconds=totals.step_s, peak_bytes=peak_bytes,
    )  # fmt: skip
