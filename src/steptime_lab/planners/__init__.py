"""Baselines of the planner of shardings, under the same cost; the shardings of an analytic plan as its options."""
