"""Measures the machine that it runs on and writes what it found as a cluster file."""

MAX_PROCESSES = 256
"""Largest number of ranks of collectives on one machine."""
