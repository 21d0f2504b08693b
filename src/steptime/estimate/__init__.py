"""The one place where hardware, workload, cost and plan meet."""
