"""Laboratory: what was measured, what is fitted to it, and how far predictions are from it."""
