"""Work and launches of an optimiser step over lists of tensors."""

from __future__ import annotations

from steptime.num import Num, ceil_div, maximum

CHUNK_ELEMENTS, CHUNKS_PER_LAUNCH = 65536, 320
"""Elements of a chunk, chunks of a launch of kernels over lists (PyTorch, ATen/native/cuda/MultiTensorApply.cuh)."""
TENSORS_PER_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""Tensors of a launch by the number of lists that it walks over, ibidem: as many as fit into kernel arguments."""


def adam_flops(elements: Num) -> Num:
    r"""Vector operations of a step of Adam: $F = 13x$ (two averages 6, corrections 2, root, division, step, decay 2).

    where $x$ = `elements` are the parameters of the step.

    Source: count of operations, Kingma and Ba, arXiv 1412.6980, algorithm 1; Loshchilov and Hutter, arXiv 1711.05101.

    >>> adam_flops(2)
    26
    """
    return 13 * elements


def list_launches(tensors: Num, elements: Num, tensors_per_launch: Num) -> Num:
    r"""Kernels that one operator over lists of tensors launches: $n = \max(\lceil t/t_0\rceil, \lceil x/(c\,l)\rceil)$.

    where $t$ = `tensors` of a list, at most $t_0$ = `tensors_per_launch` of them in one launch, $x$ = `elements`
    altogether in chunks of $c$ = 65,536, $l$ = 320 chunks in one launch (:data:`CHUNK_ELEMENTS`,
    :data:`CHUNKS_PER_LAUNCH`).

    Source: PyTorch 2.13, ATen/native/cuda/MultiTensorApply.cuh.

    >>> list_launches(100, 1e6, 48), list_launches(2, 100e6, 48)
    (3, 5.0)
    """
    return maximum(ceil_div(tensors, tensors_per_launch), ceil_div(elements, CHUNK_ELEMENTS * CHUNKS_PER_LAUNCH))
