"""Commands of the memory hierarchy."""
