"""Baselines of the sharding planner under the same cost, and the shardings of an analytic plan as its options."""
