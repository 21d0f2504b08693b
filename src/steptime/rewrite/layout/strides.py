"""Layouts of values: strides, the order of dims that they imply, and names of orders."""

from __future__ import annotations

import itertools
from typing import Final

from steptime.captured.graph import TensorType, contiguous_strides
from steptime.captured.graph.strides import is_contiguous, strides_of, tensor_type

Layout = tuple[int, ...]
"""Strides in elements; 0 for dims of size 1, whose stride does not matter."""
Order = tuple[int, ...]
"""Dims by falling stride."""

CHANNELS_LAST: Final[dict[int, Order]] = {4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}
"""Rank -> order with the channels (dim 1) fastest."""
_NAMES: Final = {(4, True): "NHWC", (4, False): "NCHW", (5, True): "NDHWC", (5, False): "NCDHW"}


def layout_of(type: TensorType) -> Layout:
    """Layout of a type.

    >>> layout_of(TensorType((1, 8, 4), "fp32"))
    (0, 4, 1)
    """
    return laid(type.shape, strides_of(type))


def laid(shape: tuple[int, ...], strides: tuple[int, ...]) -> Layout:
    """Strides with 0 where the size is 1."""
    return tuple(stride if size != 1 else 0 for size, stride in zip(shape, strides, strict=True))


def typed(type: TensorType, layout: Layout) -> TensorType:
    """The type with other strides; dims of size 1 have the stride that PyTorch gives them.

    >>> typed(TensorType((2, 3), "fp32"), (1, 2)).strides
    (1, 2)
    """
    if layout_of(type) == layout:
        return type
    if layout == laid(type.shape, contiguous_strides(type.shape)):
        return TensorType(type.shape, type.dtype)
    whole = dense_strides(type.shape, order_of(layout))
    same = laid(type.shape, whole) == layout
    return tensor_type(type.shape, type.dtype, whole if same else tuple(s or 1 for s in layout))


def order_of(layout: Layout) -> Order:
    """Dims from the largest stride to the smallest; a dim of stride 0 follows the dim before it.

    >>> order_of((12, 1, 3)), order_of((6, 2, 1)), order_of((0, 1, 4))
    ((0, 2, 1), (0, 1, 2), (0, 2, 1))
    """
    active = sorted((d for d, stride in enumerate(layout) if stride), key=lambda d: (-layout[d], d))
    if active == sorted(active):
        return tuple(range(len(layout)))
    out: list[int] = [d for d, stride in enumerate(layout) if not stride and not any(layout[:d])]
    for dim in active:
        out.append(dim)
        follower = dim + 1
        while follower < len(layout) and not layout[follower]:
            out.append(follower)
            follower += 1
    return tuple(out)


def dense_strides(shape: tuple[int, ...], order: Order) -> tuple[int, ...]:
    """Strides of a gapless tensor with its dims in an order.

    >>> dense_strides((2, 3, 4, 5), (0, 2, 3, 1))
    (60, 1, 15, 3)
    """
    step, out = 1, [0] * len(shape)
    for dim in reversed(order):
        out[dim] = step
        step *= max(shape[dim], 1)
    return tuple(out)


def dense(shape: tuple[int, ...], order: Order) -> Layout:
    """Gapless layout with the dims in an order."""
    return laid(shape, dense_strides(shape, order))


def rows(shape: tuple[int, ...]) -> Layout:
    """Layout of a contiguous tensor: the last dim fastest."""
    return laid(shape, contiguous_strides(shape))


def turned(shape: tuple[int, ...]) -> Layout:
    """Column-major layout: the second-to-last dim is fastest.

    >>> turned((2, 3, 4))
    (12, 1, 3)
    """
    rank = len(shape)
    return dense(shape, (*range(rank - 2), rank - 1, rank - 2))


def follows(layout: Layout, order: Order) -> bool:
    """True if a layout has its dims in an order, with gaps or without; dims of stride 0 do not count.

    >>> follows((12, 4, 1), (0, 1, 2)), follows((1, 0), (1, 0)), follows((1, 2), (0, 1))
    (True, True, False)
    """
    seen = [layout[dim] for dim in order if layout[dim]]
    return all(a > b for a, b in itertools.pairwise(seen))


def within(order: Order, rank: int) -> Order:
    """The order of the dims of a lower-rank tensor that is broadcast to tensors in an order.

    >>> within((0, 2, 3, 1), 3)
    (1, 2, 0)
    """
    added = len(order) - rank
    return tuple(dim - added for dim in order if dim >= added)


def is_gapless(shape: tuple[int, ...], layout: Layout) -> bool:
    """True if the elements fill a block of memory, so that a copy can make the layout."""
    return all(stride or size == 1 for size, stride in zip(shape, layout, strict=True)) and layout == dense(
        shape, order_of(layout)
    )


def is_matrix(shape: tuple[int, ...], layout: Layout) -> bool:
    """True if a BLAS library takes a layout without a copy: one of the last two dims is dense.

    >>> is_matrix((4, 8), (1, 4)), is_matrix((4, 8), (16, 1)), is_matrix((4, 8), (16, 2))
    (True, True, False)
    """
    if len(shape) < 2:
        return True
    (m, n), (a, b) = shape[-2:], layout[-2:]
    by_rows = (n == 1 or b == 1) and (m == 1 or a >= n)
    return by_rows or ((m == 1 or a == 1) and (n == 1 or b >= m))


def name_of(type: TensorType, layout: Layout) -> str:
    """Name of a layout.

    >>> name_of(TensorType((2, 8, 4, 4), "fp16"), (128, 1, 32, 8)), name_of(TensorType((4, 8), "fp32"), (1, 4))
    ('NHWC', 'column-major')
    """
    shape, rank = type.shape, type.rank
    last = CHANNELS_LAST.get(rank)
    if is_contiguous(TensorType(shape, type.dtype, layout)) or layout == rows(shape):
        return _NAMES.get((rank, False), "row-major")
    if last is not None and layout == dense(shape, last):
        return _NAMES[rank, True]
    if rank > 1 and layout == turned(shape):
        return "column-major"
    if is_gapless(shape, layout):
        return f"order {' '.join(map(str, order_of(layout)))}"
    return "strided"
