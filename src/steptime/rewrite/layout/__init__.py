"""Layouts: the order of strides in which each value of a graph lies in memory, chosen exactly."""
