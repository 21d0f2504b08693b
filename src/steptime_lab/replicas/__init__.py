"""Simulation of replicas kept consistent by all-reduce or through parameter servers."""
