"""What to buy for a run, and what more of something is worth."""
