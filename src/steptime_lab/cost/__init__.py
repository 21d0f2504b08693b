"""Formulas of the laboratory: tiles, caches, warps, compressed weights, sparse loops, limits of scale."""
