"""Search for the cheapest way to fit a training step on one device: techniques, combinations, front, guide."""
