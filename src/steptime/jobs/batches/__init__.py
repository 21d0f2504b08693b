"""Batches of sequences of unequal lengths: padded, bucketed or packed, with their costs."""
