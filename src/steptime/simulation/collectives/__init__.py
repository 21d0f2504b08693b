"""The time of one collective by itself."""
