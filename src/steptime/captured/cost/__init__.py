"""Costs of a captured graph: operators, their times on a device, sums, metrics."""

from steptime.captured.cost.table import CostTable, Coverage, Group, Metrics, Totals, Unknown, cost_table, table_metrics
from steptime.captured.cost.timing import OperatorCost, Timer, work_of
from steptime.captured.ops.work import KernelCall, OperatorWork, Work

__all__ = [
    "CostTable", "Coverage", "Group", "KernelCall", "Metrics", "OperatorCost", "OperatorWork",
    "Timer", "Totals", "Unknown", "Work", "cost_table", "table_metrics", "work_of",
]  # fmt: skip
