"""The questions by which a plan is chosen by hand, answered."""
