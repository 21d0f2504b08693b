"""Finds the best plan: every candidate of a space is costed or bounded, so that the first plan is proved best."""
