"""Solvers that choose which activations to keep, recompute, or move to the host."""
