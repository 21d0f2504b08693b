"""Partial equality: programs that give the same on a part of the output, corrected so that they are exact."""
