"""The cheapest way to make a training step fit on one device: techniques, their combinations, the front, the guide."""
