"""Strides of tensors, and the views that need no copy."""

from __future__ import annotations

import math
from collections.abc import Sequence

from steptime.captured.graph.program import TensorType, contiguous_strides


def strides_of(type: TensorType) -> tuple[int, ...]:
    """Strides in elements; contiguous ones if the type has none.

    >>> strides_of(TensorType((2, 3), "fp32"))
    (3, 1)
    """
    return contiguous_strides(type.shape) if type.strides is None else type.strides


def tensor_type(shape: Sequence[int], dtype: str, strides: Sequence[int] | None = None) -> TensorType:
    """A type that leaves out contiguous strides.

    Raises:
        ValueError: a size is negative.
    """
    sizes = tuple(int(size) for size in shape)
    if any(size < 0 for size in sizes):
        raise ValueError(f"a shape cannot have negative sizes: {sizes}")
    if strides is None or is_contiguous(made := TensorType(sizes, dtype, tuple(strides))):
        return TensorType(sizes, dtype)
    return made


def is_contiguous(type: TensorType) -> bool:
    """True if elements lie in memory in the order of the dims; dims of size 1 do not matter.

    >>> is_contiguous(TensorType((2, 3), "fp32", (1, 2)))
    False
    """
    if type.strides is None:
        return True
    expected = 1
    for size, stride in zip(reversed(type.shape), reversed(type.strides), strict=True):
        if size != 1 and stride != expected:
            return type.elements == 0
        expected *= max(size, 1)
    return True


def is_dense(type: TensorType) -> bool:
    """True if the elements fill a block of memory without gaps or overlaps, in any order of dims.

    >>> is_dense(TensorType((2, 3), "fp32", (1, 2))), is_dense(TensorType((2, 3), "fp32", (1, 0)))
    (True, False)
    """
    if type.strides is None:
        return True
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(type.shape, type.strides, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def view_strides(type: TensorType, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of a view of the tensor as ``shape``; None if it needs a copy.

    Dims of the new shape have to fit into groups of old dims that are contiguous among themselves.

    >>> view_strides(TensorType((2, 3), "fp32"), (6,))
    (1,)
    >>> view_strides(TensorType((2, 3), "fp32", (1, 2)), (6,)) is None
    True
    """
    if math.prod(shape) != type.elements:
        raise ValueError(f"{type.shape} has {type.elements} elements and cannot be seen as {tuple(shape)}")
    if type.elements == 0 or is_contiguous(type):
        return contiguous_strides(tuple(shape))
    old = strides_of(type)
    new = [0] * len(shape)
    at = len(shape) - 1
    run_stride, run, seen = old[-1], 1, 1
    for dim in range(type.rank - 1, -1, -1):
        run *= type.shape[dim]
        if dim and (type.shape[dim - 1] == 1 or old[dim - 1] == run * run_stride):
            continue
        while at >= 0 and (seen < run or shape[at] == 1):
            new[at] = seen * run_stride
            seen *= shape[at]
            at -= 1
        if seen != run:
            return None
        if dim:
            run_stride, run, seen = old[dim - 1], 1, 1
    return tuple(new) if at == -1 else None


def wrap(dim: int, rank: int) -> int:
    """A dim counted from the front.

    >>> wrap(-1, 3)
    2
    """
    if not -max(rank, 1) <= dim < max(rank, 1):
        raise ValueError(f"dim {dim} is outside a tensor of rank {rank}")
    return dim % max(rank, 1)


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the result of an element-wise operator on tensors of these shapes.

    >>> broadcast((4, 1, 3), (2, 3))
    (4, 2, 3)
    """
    rank = max((len(shape) for shape in shapes), default=0)
    result = [1] * rank
    for shape in shapes:
        for dim, size in enumerate(shape, rank - len(shape)):
            if size != 1 and result[dim] not in (1, size):
                raise ValueError(f"shapes {', '.join(map(str, shapes))} do not broadcast")
            result[dim] = size if size != 1 else result[dim]
    return tuple(result)
