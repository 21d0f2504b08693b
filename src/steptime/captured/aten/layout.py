"""Strides: when a tensor can be looked at in another shape without a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence

from steptime.captured.graph.types import TensorType, contiguous_strides

#: Operators whose (first) output is another look at the storage of their first input.
VIEWS = frozenset({
    "view", "_unsafe_view", "_reshape_alias", "t", "transpose", "permute", "expand", "slice", "select", "squeeze",
    "unsqueeze", "split", "split_with_sizes", "unbind", "detach", "alias", "as_strided", "diagonal", "unfold",
    "unsafe_split", "unsafe_split_with_sizes", "lift_fresh", "view_as_real", "view_as_complex",
})  # fmt: skip


def strides_of(type: TensorType) -> tuple[int, ...]:
    """Strides in elements; those of a contiguous tensor where none are given.

    >>> strides_of(TensorType((2, 3), "fp32"))
    (3, 1)
    """
    return contiguous_strides(type.shape) if type.strides is None else type.strides


def tensor_type(shape: Sequence[int], dtype: str, strides: Sequence[int] | None = None) -> TensorType:
    """A type whose strides are left out where they are the contiguous ones.

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
    """Whether elements lie in memory in the order of the dims; sizes of 1 do not matter.

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
    """Whether the elements fill a block of memory without gaps or overlaps, in any order of dims.

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
    """Strides with which the tensor shows as ``shape`` without a copy; None where it cannot.

    Dims of the new shape are laid into runs of old dims that are contiguous among themselves.

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


def like(type: TensorType, dtype: str | None = None) -> TensorType:
    """Type of a fresh tensor with that shape and the same order of dims in memory."""
    return fresh(type.shape, dtype or type.dtype, [type])


def fresh(shape: tuple[int, ...], dtype: str, operands: Sequence[TensorType]) -> TensorType:
    """Type of the result of an element-wise operator: dims in memory in the order that the operands have.

    PyTorch sorts dims by stride, from the fastest, the first operand deciding first; broadcast dims decide nothing.

    >>> fresh((2, 3, 4), "fp32", [TensorType((2, 3, 4), "fp32", (100, 1, 3))]).strides
    (12, 1, 3)
    """
    full = [type for type in operands if type.shape == shape]
    if all(type.strides is None for type in operands) or not shape:
        return TensorType(shape, dtype)
    if len(full) == len(operands) and is_dense(full[0]) and all(type.strides == full[0].strides for type in full):
        return TensorType(shape, dtype, full[0].strides)
    strides = [_broadcast_strides(type, shape) for type in operands]
    order = list(range(len(shape) - 1, -1, -1))
    for last in range(1, len(order)):
        at = last
        for before in range(last - 1, -1, -1):
            side = _slower(order[before], order[at], shape, strides)
            if side > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif side < 0:
                break
    step, made = 1, [0] * len(shape)
    for dim in order:
        made[dim] = step
        step *= max(shape[dim], 1)
    return tensor_type(shape, dtype, made)


def _broadcast_strides(type: TensorType, shape: tuple[int, ...]) -> tuple[int, ...]:
    added = len(shape) - type.rank
    own = tuple(
        0 if size == 1 != whole else step
        for size, whole, step in zip(type.shape, shape[added:], strides_of(type), strict=True)
    )
    return (0,) * added + own


def _slower(a: int, b: int, shape: tuple[int, ...], strides: Sequence[tuple[int, ...]]) -> int:
    """1 where dim ``a`` has the larger stride, -1 where it has the smaller, 0 where no operand decides."""
    for steps in strides:
        if steps[a] and steps[b]:
            if steps[a] != steps[b]:
                return 1 if steps[a] > steps[b] else -1
            if shape[a] > shape[b]:
                return 1
    return 0
