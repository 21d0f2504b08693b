"""Strides and views: when a tensor has another shape without a copy, and operators that show, cut or join tensors.

The constructors work out the types of the outputs. Each is named as the ATen operator that it makes, and its arguments
are that operator's. All raise ``ValueError`` where the arguments do not fit each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from steptime.captured.graph.program import Attribute, Nodes, TensorType, Value, contiguous_strides


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


def wrap(dim: int, rank: int) -> int:
    """A dim counted from the front.

    >>> wrap(-1, 3)
    2
    """
    if not -max(rank, 1) <= dim < max(rank, 1):
        raise ValueError(f"dim {dim} is outside a tensor of rank {rank}")
    return dim % max(rank, 1)


def clone(nodes: Nodes, x: Value) -> Value:
    """A contiguous copy."""
    attributes = {"memory_format": "torch.contiguous_format"}
    return nodes.apply("clone", {"self": x}, attributes, outputs=[TensorType(x.type.shape, x.type.dtype)]).value()


def reshape(nodes: Nodes, x: Value, shape: Sequence[int]) -> Value:
    """``view`` where the strides allow it, else ``clone`` and ``_unsafe_view``, as PyTorch does."""
    shape = tuple(int(size) for size in shape)
    if shape == x.type.shape:
        return x
    strides = view_strides(x.type, shape)
    op = "view" if strides is not None else "_unsafe_view"
    source = x if strides is not None else clone(nodes, x)
    output = tensor_type(shape, x.type.dtype, strides)
    return nodes.apply(op, {"self": source}, {"size": shape}, outputs=[output]).value()


def _with_dims(x: Value, dims: Sequence[int]) -> TensorType:
    """What a look at some dims in some order is."""
    strides = strides_of(x.type)
    return tensor_type([x.type.shape[d] for d in dims], x.type.dtype, [strides[d] for d in dims])


def permute(nodes: Nodes, x: Value, dims: Sequence[int]) -> Value:
    """Dims in another order."""
    dims = tuple(wrap(dim, x.type.rank) for dim in dims)
    if sorted(dims) != list(range(x.type.rank)):
        raise ValueError(f"{dims} does not order the dims of {x.type}")
    if dims == tuple(range(x.type.rank)):
        return x
    return nodes.apply("permute", {"self": x}, {"dims": dims}, outputs=[_with_dims(x, dims)]).value()


def transpose(nodes: Nodes, x: Value, dim0: int, dim1: int) -> Value:
    """Two dims exchanged."""
    a, b = wrap(dim0, x.type.rank), wrap(dim1, x.type.rank)
    order = list(range(x.type.rank))
    order[a], order[b] = order[b], order[a]
    output = _with_dims(x, order)
    return nodes.apply("transpose", {"self": x}, {"dim0": dim0, "dim1": dim1}, outputs=[output]).value()


def t(nodes: Nodes, x: Value) -> Value:
    """A matrix transposed; the transpose of a transpose is the matrix itself."""
    if x.node.op == "t":
        return x.node.inputs[0]
    if x.type.rank != 2:
        raise ValueError(f"t takes a matrix, not {x.type}")
    return nodes.apply("t", {"self": x}, outputs=[_with_dims(x, (1, 0))]).value()


def expand(nodes: Nodes, x: Value, shape: Sequence[int]) -> Value:
    """Sizes of 1 shown as larger ones, and dims added in front, all by strides of zero."""
    shape = tuple(int(size) for size in shape)
    if shape == x.type.shape:
        return x
    added = len(shape) - x.type.rank
    if added < 0 or any(
        old not in (1, new) for old, new in zip(x.type.shape, shape[max(added, 0) :], strict=added >= 0)
    ):
        raise ValueError(f"{x.type} cannot be expanded to {shape}")
    strides = [0] * added
    for old, new, stride in zip(x.type.shape, shape[added:], strides_of(x.type), strict=True):
        strides.append(stride if old == new else 0)
    output = tensor_type(shape, x.type.dtype, strides)
    return nodes.apply("expand", {"self": x}, {"size": shape}, outputs=[output]).value()


def slice(nodes: Nodes, x: Value, dim: int, start: int, end: int, step: int = 1) -> Value:
    """Elements ``start, start + step, ...`` below ``end`` of one dim."""
    dim = wrap(dim, x.type.rank)
    size = x.type.shape[dim]
    start, end = (min(max(bound + size if bound < 0 else bound, 0), size) for bound in (start, end))
    end = max(start, end)
    if step < 1:
        raise ValueError(f"slice takes a positive step, not {step}")
    if (start, end, step) == (0, size, 1):
        return x
    shape, strides = list(x.type.shape), list(strides_of(x.type))
    shape[dim] = -(-(end - start) // step)
    strides[dim] *= step
    output = tensor_type(shape, x.type.dtype, strides)
    attributes: dict[str, Attribute] = {"dim": dim, "start": start, "end": end, "step": step}
    return nodes.apply("slice", {"self": x}, attributes, outputs=[output]).value()


def select(nodes: Nodes, x: Value, dim: int, index: int) -> Value:
    """One element of one dim, which goes."""
    dim = wrap(dim, x.type.rank)
    if not -x.type.shape[dim] <= index < x.type.shape[dim]:
        raise ValueError(f"index {index} is outside dim {dim} of {x.type}")
    shape, strides = list(x.type.shape), list(strides_of(x.type))
    del shape[dim], strides[dim]
    output = tensor_type(shape, x.type.dtype, strides)
    return nodes.apply("select", {"self": x}, {"dim": dim, "index": index}, outputs=[output]).value()


def unsqueeze(nodes: Nodes, x: Value, dim: int) -> Value:
    """A dim of size 1 put in."""
    dim = wrap(dim, x.type.rank + 1)
    shape, strides = list(x.type.shape), list(strides_of(x.type))
    stride = shape[dim] * strides[dim] if dim < x.type.rank else 1
    shape.insert(dim, 1)
    strides.insert(dim, stride)
    output = tensor_type(shape, x.type.dtype, strides)
    return nodes.apply("unsqueeze", {"self": x}, {"dim": dim}, outputs=[output]).value()


def squeeze(nodes: Nodes, x: Value, dims: Sequence[int]) -> Value:
    """Those of the dims taken out whose size is 1."""
    gone = tuple(sorted({wrap(dim, x.type.rank) for dim in dims} if x.type.rank else ()))
    kept = [dim for dim in range(x.type.rank) if dim not in gone or x.type.shape[dim] != 1]
    if len(kept) == x.type.rank:
        return x
    return nodes.apply("squeeze", {"self": x}, {"dim": gone}, outputs=[_with_dims(x, kept)]).value()


def split_with_sizes(nodes: Nodes, x: Value, sizes: Sequence[int], dim: int) -> tuple[Value, ...]:
    """Consecutive parts of one dim."""
    dim = wrap(dim, x.type.rank)
    if sum(sizes) != x.type.shape[dim] or any(size < 0 for size in sizes):
        raise ValueError(f"parts of {tuple(sizes)} do not fill dim {dim} of {x.type}")
    shape, old = x.type.shape, strides_of(x.type)
    outputs = [tensor_type((*shape[:dim], size, *shape[dim + 1 :]), x.type.dtype, old) for size in sizes]
    attributes: dict[str, Attribute] = {"split_sizes": tuple(int(size) for size in sizes), "dim": dim}
    node = nodes.apply("split_with_sizes", {"self": x}, attributes, outputs=outputs)
    return tuple(node.value(index) for index in range(len(outputs)))


def cat(nodes: Nodes, parts: Sequence[Value], dim: int) -> Value:
    """Tensors joined along one dim."""
    first = parts[0].type
    dim = wrap(dim, first.rank)
    for part in parts:
        if part.type.rank != first.rank or any(
            a != b for d, (a, b) in enumerate(zip(part.type.shape, first.shape, strict=True)) if d != dim
        ):
            raise ValueError(f"{part.type} and {first} cannot be joined along dim {dim}")
    shape = list(first.shape)
    shape[dim] = sum(part.type.shape[dim] for part in parts)
    return nodes.apply("cat", {"tensors": parts}, {"dim": dim}, outputs=[tensor_type(shape, first.dtype)]).value()


def stack(nodes: Nodes, parts: Sequence[Value], dim: int) -> Value:
    """Tensors joined along a new dim."""
    return cat(nodes, [unsqueeze(nodes, part, dim) for part in parts], dim)


def flatten(nodes: Nodes, x: Value, axis: int) -> Value:
    """A matrix: dims before ``axis`` as rows, the rest as columns."""
    return reshape(nodes, x, (math.prod(x.type.shape[:axis]), math.prod(x.type.shape[axis:])))
