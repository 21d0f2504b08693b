"""Small integer sums that exporters leave in a graph (shapes, indices), done while it is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from steptime.captured.onnx.limits import MAX_FOLDED_ELEMENTS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

Attributes = dict[str, Any]
Fold = Callable[[Sequence[Any], Attributes], Any]


def _axes(inputs: Sequence[Any], attributes: Attributes) -> tuple[int, ...] | None:
    given = attributes.get("axes")
    if given is None and len(inputs) > 1 and inputs[1] is not None:
        given = inputs[1].reshape(-1).tolist()
    return None if given is None else tuple(int(axis) for axis in given)


def _slice(inputs: Sequence[Any], attributes: Attributes) -> Array:
    data = inputs[0]
    starts, ends, axes, steps = [*inputs[1:], None, None, None, None][:4]
    starts = attributes.get("starts", starts)
    ends = attributes.get("ends", ends)
    axes = attributes.get("axes", axes)
    index = [slice(None)] * data.ndim
    for n, (start, end) in enumerate(zip(np.ravel(starts), np.ravel(ends), strict=True)):
        step = 1 if steps is None else int(steps[n])
        stop: int | None = int(end)
        if step < 0 and int(end) < -data.shape[n if axes is None else int(axes[n])]:
            stop = None
        index[n if axes is None else int(axes[n])] = slice(int(start), stop, step)
    return np.asarray(data[tuple(index)])


def _reshape(inputs: Sequence[Any], attributes: Attributes) -> Array:
    data, shape = inputs[0], [int(size) for size in inputs[1]]
    if not attributes.get("allowzero"):
        shape = [data.shape[n] if size == 0 else size for n, size in enumerate(shape)]
    return np.asarray(data.reshape(shape))


def _unsqueeze(inputs: Sequence[Any], attributes: Attributes) -> Array:
    axes = _axes(inputs, attributes) or ()
    return np.asarray(np.expand_dims(inputs[0], axes))


def _range(inputs: Sequence[Any], _: Attributes) -> Array:
    start, limit, delta = (array.reshape(-1)[0] for array in inputs)
    return np.arange(start, limit, delta, dtype=inputs[0].dtype)


def _divide(inputs: Sequence[Any], _: Attributes) -> Array:
    a, b = inputs
    if a.dtype.kind in "iu":
        return np.asarray(np.trunc(np.true_divide(a, b)).astype(a.dtype))
    return np.asarray(a / b)


def _reduce(function: Any) -> Fold:
    def fold(inputs: Sequence[Any], attributes: Attributes) -> Array:
        axes = _axes(inputs, attributes)
        if axes is None and attributes.get("noop_with_empty_axes"):
            return np.asarray(inputs[0])
        keep = bool(attributes.get("keepdims", 1))
        return np.asarray(function(inputs[0], axis=axes, keepdims=keep)).astype(inputs[0].dtype)

    return fold


def _map(function: Any) -> Fold:
    def fold(inputs: Sequence[Any], _: Attributes) -> Array:
        result = np.asarray(function(*inputs))
        same = result.dtype.kind != "b" and inputs[-1].dtype.kind != "b"
        return np.asarray(result.astype(inputs[-1].dtype) if same else result)

    return fold


#: ONNX operator -> the same on arrays.
FOLDS: dict[str, Fold] = {
    "Add": _map(np.add), "Sub": _map(np.subtract), "Mul": _map(np.multiply), "Div": _divide, "Neg": _map(np.negative),
    "Mod": _map(np.mod), "Abs": _map(np.abs), "Sqrt": _map(np.sqrt), "Pow": _map(np.power), "Exp": _map(np.exp),
    "Floor": _map(np.floor), "Ceil": _map(np.ceil), "Min": _map(np.minimum), "Max": _map(np.maximum),
    "Reciprocal": _map(np.reciprocal), "Log": _map(np.log), "Sin": _map(np.sin), "Cos": _map(np.cos),
    "Equal": _map(np.equal), "Greater": _map(np.greater), "GreaterOrEqual": _map(np.greater_equal),
    "Less": _map(np.less), "LessOrEqual": _map(np.less_equal), "And": _map(np.logical_and),
    "Or": _map(np.logical_or), "Not": _map(np.logical_not),
    "Where": lambda i, a: np.asarray(np.where(*i)).astype(i[1].dtype),
    "Gather": lambda i, a: np.asarray(np.take(i[0], i[1].astype(np.int64), axis=int(a.get("axis", 0)))),
    "Concat": lambda i, a: np.concatenate(i, axis=int(a["axis"])),
    "Unsqueeze": _unsqueeze,
    "Squeeze": lambda i, a: np.squeeze(i[0], axis=_axes(i, a)),
    "Slice": _slice, "Reshape": _reshape, "Range": _range,
    "Flatten": lambda i, a: i[0].reshape(int(np.prod(i[0].shape[: int(a.get("axis", 1))], dtype=np.int64)), -1),
    "Transpose": lambda i, a: np.transpose(i[0], a.get("perm")),
    "Expand": lambda i, a: np.asarray(i[0] * np.ones([int(s) for s in i[1]], dtype=i[0].dtype)),
    "Tile": lambda i, a: np.tile(i[0], [int(n) for n in i[1]]),
    "CumSum": lambda i, a: np.cumsum(i[0], axis=int(i[1].reshape(-1)[0]), dtype=i[0].dtype),
    "ReduceSum": _reduce(np.sum), "ReduceProd": _reduce(np.prod), "ReduceMax": _reduce(np.max),
    "ReduceMin": _reduce(np.min), "ReduceMean": _reduce(np.mean),
}  # fmt: skip


def result_elements(op: str, inputs: Sequence[Any]) -> int:
    """Elements that the result of a fold has at most, known before it is made."""
    arrays = [array for array in inputs if array is not None]
    sizes: list[int] = [max(int(array.size), 1) for array in arrays]
    if op == "Expand":
        return sizes[0] * math.prod(max(int(s), 1) for s in inputs[1])
    if op == "Tile":
        return sizes[0] * math.prod(max(int(n), 1) for n in inputs[1])
    if op == "Range":
        start, limit, delta = (float(array.reshape(-1)[0]) for array in arrays)
        return int(abs((limit - start) / delta)) + 1 if delta else MAX_FOLDED_ELEMENTS + 1
    if op == "Gather":
        return sizes[0] * sizes[1]
    if op == "Concat":
        return sum(sizes)
    rank = max(array.ndim for array in arrays)
    shape: list[int] = [max((a.shape[-d] for a in arrays if a.ndim >= d), default=1) for d in range(1, rank + 1)]
    return max(math.prod(shape), *sizes)


def fold(op: str, inputs: Sequence[Any], attributes: Attributes) -> Any:
    """Result of the operator on arrays; None where there is no row for it or the result would be large."""
    row = FOLDS.get(op)
    if row is None or not inputs or result_elements(op, inputs) > MAX_FOLDED_ELEMENTS:
        return None
    if op in ("Min", "Max") and len(inputs) != 2:
        return None
    with np.errstate(all="ignore"):
        return row(inputs, attributes)
