"""Partial equality: programs that are equal on a part of the output, with corrections that make them exact."""
