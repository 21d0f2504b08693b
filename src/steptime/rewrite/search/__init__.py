"""Searches over equivalent graphs: what is searched, what a graph costs, how far from the best a search stopped."""
