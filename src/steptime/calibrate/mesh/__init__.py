"""From pairwise latency and bandwidth to a mesh: read, discover the axes, regress each of them, say how sure it is."""
