"""How much of a file is kept as arrays."""

MAX_FOLDED_ELEMENTS = 2**20
"""Elements of an array that is computed or held while a file is read; what is larger stays a node of the graph."""

MAX_PARTS = 2**14
"""Tensors of one sequence; each is a node of the graph."""
