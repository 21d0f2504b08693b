"""Replicas kept consistent through all-reduce or parameter servers, played."""
