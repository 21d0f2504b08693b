"""Fourier transforms."""

from __future__ import annotations

import math
from typing import Final

from steptime.captured.graph import Node
from steptime.captured.ops.labels import FIXED, OperatorDims, labelled, numbered, terms_of
from steptime.captured.ops.operator import Operator
from steptime.captured.ops.work import STREAMED, OperatorWork, integers, moved
from steptime.cost.elementwise import transform_flops
from steptime.estimate.operators import Formula
from steptime.num import Num


def _dims(node: Node) -> tuple[int, ...]:
    """Dims that are transformed."""
    rank = node.inputs[0].type.rank
    return tuple(dim % rank for dim in integers(node, "dim"))


def _sizes(node: Node) -> dict[str, Num]:
    """Elements of the larger side, points of one transform, 1 if one side is real, passes over memory (one per dim)."""
    types = [node.inputs[0].type, *node.outputs]
    largest = max(types, key=lambda type: type.elements)
    real = not all(type.dtype.startswith("complex") for type in types)
    points = math.prod(largest.shape[dim] for dim in _dims(node))
    passes = float(max(len(_dims(node)), 1))
    return {"elements": largest.elements, "points": points, "real": float(real), "dims": passes}


def _transformed(node: Node) -> OperatorDims:
    """Dims of a transform: dims that are not transformed are independent; it is linear."""
    names = tuple(
        f"{FIXED}{name}" if dim in _dims(node) else name for dim, name in enumerate(numbered(node.outputs[0].rank))
    )
    return OperatorDims(dims=labelled(node, [names], [names]), terms=terms_of(node, ("self",)))


TRANSFORMS: Final = (
    Operator(
        names="_fft_r2c _fft_c2c _fft_c2r",
        family="move",
        work=OperatorWork(
            sizes=_sizes,
            vector_flops=Formula(transform_flops),
            moved_bytes=lambda s: s["dims"] * STREAMED(s),
            launches=lambda s: s["dims"],
            kernels=moved,
        ),
        dims=_transformed,
    ),
)
"""Fast Fourier transforms."""
