"""What a captured graph costs: operators, their times on a device, sums, metrics."""

from steptime.estimate.graph.metrics import Metrics, table_metrics
from steptime.estimate.graph.operators import FAMILIES, ROWS, work_of
from steptime.estimate.graph.table import CostTable, Coverage, Group, Totals, Unknown, cost_table
from steptime.estimate.graph.timing import OperatorCost, Timer
from steptime.estimate.graph.work import KernelCall, OperatorRow, Work

__all__ = [
    "FAMILIES", "ROWS", "CostTable", "Coverage", "Group", "KernelCall", "Metrics", "OperatorCost", "OperatorRow",
    "Timer", "Totals", "Unknown", "Work", "cost_table", "table_metrics", "work_of",
]  # fmt: skip
