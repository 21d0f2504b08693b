"""Finds the best plan: every candidate of a space is costed, so the first plan is proved best."""
