"""Batches of sequences of unequal lengths: padded, bucketed or packed, and what each costs."""
