"""Work that was counted operator by operator beforehand: what a recorded graph does."""

from __future__ import annotations

from steptime.num import Num


def counted_matrix_flops(matrix_flops: Num) -> Num:
    r"""Matrix operations $F$ = `matrix_flops` as they were counted.

    Source: definition.

    >>> counted_matrix_flops(12.0)
    12.0
    """
    return matrix_flops


def counted_vector_flops(vector_flops: Num) -> Num:
    r"""Vector operations $F$ = `vector_flops` as they were counted.

    Source: definition.

    >>> counted_vector_flops(12.0)
    12.0
    """
    return vector_flops


def counted_bytes(moved_bytes: Num) -> Num:
    r"""Memory traffic $M$ = `moved_bytes` as it was counted.

    Source: definition.

    >>> counted_bytes(12.0)
    12.0
    """
    return moved_bytes
