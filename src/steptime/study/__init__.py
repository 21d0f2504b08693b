"""Studies that use the whole machine: reproductions of published models, limits, sweeps."""
