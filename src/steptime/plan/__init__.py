"""Parallelisation of a job: degrees, placement, strategies as tables of rows, legality, the space of plans."""
