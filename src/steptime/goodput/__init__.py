"""A whole training run: when it is done with failures, what it costs in money and energy, what to buy for it."""
