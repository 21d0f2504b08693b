"""The one place where hardware, workload, cost, schedule and plan meet."""
