"""Searches over equivalent graphs: problems, costs of graphs, search methods, and bounds."""
