"""The memory hierarchy: traces of memory accesses, simulated caches, reuse distances, predicted levels, tiles."""
