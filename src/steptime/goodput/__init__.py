"""A whole training run: its time with failures, its cost in money and energy, and the objectives of a search."""
