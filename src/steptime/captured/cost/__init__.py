"""What a captured graph costs: operators, their times on a device, sums, metrics."""

from steptime.captured.cost.table import CostTable, Coverage, Group, Metrics, Totals, Unknown, cost_table, table_metrics
from steptime.captured.cost.timing import FAMILIES, ROWS, OperatorCost, Timer, work_of
from steptime.captured.cost.work import KernelCall, OperatorRow, Work

__all__ = [
    "FAMILIES", "ROWS", "CostTable", "Coverage", "Group", "KernelCall", "Metrics", "OperatorCost", "OperatorRow",
    "Timer", "Totals", "Unknown", "Work", "cost_table", "table_metrics", "work_of",
]  # fmt: skip
