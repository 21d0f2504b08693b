"""How a job is parallelised: degrees, placement, strategies as tables of rows, legality, the space."""
