"""Measuring: this machine, the mesh of a cluster, and tables of runs against their predictions."""
