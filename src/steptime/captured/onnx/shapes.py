"""Rows of views, slices, concatenations and indexing, and of sequences of tensors.

The length of a sequence is known, so sequences leave no trace in the graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch

from steptime.captured import torch_parts as parts
from steptime.captured.graph.strides import broadcast, wrap
from steptime.captured.onnx.call import OnnxCall, Result, enter, real, row
from steptime.captured.onnx.elementwise import flattened
from steptime.captured.onnx.tensor import MAX_PARTS, Tensor, flat
from steptime.captured.record.values import TORCH_DTYPES
from steptime.num import ceil_div

aten = torch.ops.aten

enter({
    "Shape": lambda c: real(c.tensor(0).shape[c.get("start", 0) : c.get("end")]),
    "Size": lambda c: real(math.prod(c.tensor(0).shape)),
    "Flatten": lambda c: flattened(c.x(), _end(int(c.get("axis", 1)), len(c.tensor(0).shape))),
    "Squeeze": lambda c: c.x().squeeze(c.axes() or tuple(range(c.x().dim()))),
    "Expand": lambda c: expanded(c.x(), broadcast(c.tensor(0).shape, tuple(c.known(1)))),
    "Concat": lambda c: torch.cat(c.all(), c.axis(1)),
    "GatherElements": lambda c: torch.gather(c.x(), c.axis(0), c.x(1)),
    "Trilu": lambda c: (torch.triu if c.get("upper", 1) else torch.tril)(c.x(), int(c.one(1, 0))),
    "SequenceConstruct": lambda c: _sequence(c, [c.tensor(n) for n in range(len(c.inputs))]),
    "SequenceEmpty": lambda c: _sequence(c, []),
    "SequenceAt": lambda c: _members(c)[int(c.one(1))],
    "SequenceLength": lambda c: real(len(_members(c))),
    "ConcatFromSequence": lambda c: (torch.stack if c.get("new_axis") else torch.cat)(
        [c.live(part, "constant") for part in _members(c)], int(c.get("axis", 0))
    ),
})  # fmt: skip


def _end(axis: int, rank: int) -> int:
    """A dim counted from the front, or the end."""
    return axis + rank if axis < 0 else axis


def expanded(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor broadcast to a shape."""
    return x if x.shape == shape else x.expand(shape)


@row("Reshape")
def _reshape(c: OnnxCall) -> Result:
    x, given = c.x(), c.ints("shape", 1)
    if given is None:
        raise ValueError("no shape is given")
    keep = not c.get("allowzero")
    return x.reshape([x.shape[n] if size == 0 and keep else size for n, size in enumerate(given)])


@row("Transpose")
def _transpose(c: OnnxCall) -> Result:
    x = c.x()
    perm = c.ints("perm") or tuple(reversed(range(x.dim())))
    moved = [n for n, dim in enumerate(perm) if dim != n]
    if len(moved) == 2 and sorted(perm) == list(range(x.dim())):
        return x.t() if x.dim() == 2 else x.transpose(*moved)
    return x.permute(perm)


@row("Unsqueeze")
def _unsqueeze(c: OnnxCall) -> Result:
    axes, x = c.ints("axes", 1) or (), c.x()
    rank = x.dim() + len(axes)
    for axis in sorted(wrap(axis, rank) for axis in axes):
        x = x.unsqueeze(axis)
    return x


@row("Split")
def _split(c: OnnxCall) -> Result:
    axis, sizes = c.axis(0), c.ints("split", 1)
    if sizes is None:
        count, whole = int(c.get("num_outputs", len(c.outputs))), c.tensor(0).shape[axis]
        each = -(-whole // count)
        sizes = tuple(max(min(each, whole - each * n), 0) for n in range(count))
    return torch.split_with_sizes(c.x(), sizes, axis)


@row("Slice")
def _slice(c: OnnxCall) -> Result:
    starts, ends = c.ints("starts", 1), c.ints("ends", 2)
    if starts is None or ends is None:
        raise ValueError("starts and ends are missing")
    axes, steps = c.axes(3) or tuple(range(len(starts))), c.ints("steps", 4) or (1,) * len(starts)
    x = c.x()
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step < 0:
            size = x.shape[axis]
            x, start, end = x.flip((axis,)), size - 1 - _bound(start, size), size - 1 - _bound(end, size)
        x = aten.slice(x, axis, start, end, abs(step))
    return x


def _bound(index: int, size: int) -> int:
    """Bound of a slice that runs backwards; -1 is before the first element."""
    return max(min(_end(index, size), size - 1), -1)


@row("Gather")
def _gather(c: OnnxCall) -> Result:
    axis, indices = c.axis(0), c.tensor(1)
    if indices.array is not None and not indices.shape:
        return c.x().select(axis, c.one(1))
    if indices.array is not None:
        with parts.without_modes():
            behind = indices.array < 0
            if bool(behind.any()):
                counted = torch.where(behind, indices.array + c.tensor(0).shape[axis], indices.array)
                c.inputs[1] = Tensor(f"{indices.name} from the front", indices.shape, indices.dtype, array=counted)
    table, index = c.weight(0), c.x(1)
    if axis == 0 and table.dim() == 2 and index.dim() > 0:
        return torch.embedding(table, index)
    found = table.index_select(axis, index if index.dim() == 1 else index.reshape(-1))
    return found.reshape((*table.shape[:axis], *index.shape, *table.shape[axis + 1 :]))


def _places(c: OnnxCall, depth: int) -> tuple[torch.Tensor, ...]:
    """Indices of each of the first dims of the data.

    Raises:
        ValueError: the data have fewer dims.
    """
    rank = len(c.tensor(0).shape)
    if depth > rank:
        raise ValueError(f"the last dim of its indices is {depth}, but its data have {rank} dims")
    return tuple(c.x(1).select(-1, n) for n in range(depth))


@row("GatherND")
def _gather_nd(c: OnnxCall) -> Result:
    shape = c.tensor(1).shape
    return None if c.get("batch_dims") or not shape or not shape[-1] else aten.index(c.x(), _places(c, shape[-1]))


@row("ScatterElements", "Scatter", "ScatterND")
def _scatter(c: OnnxCall) -> Result:
    reduction = c.get("reduction", "none")
    if reduction not in ("none", "add"):
        return None
    if c.op == "ScatterND":
        return torch.index_put(c.x(), _places(c, c.tensor(1).shape[-1]), c.x(2), accumulate=reduction == "add")
    return (torch.scatter_add if reduction == "add" else torch.scatter)(c.x(), c.axis(0), c.x(1), c.x(2))


@row("Tile")
def _tile(c: OnnxCall) -> Result:
    if len(c.known(1)) != len(c.tensor(0).shape):
        raise ValueError("a repeat for each dim is needed")
    return c.x().repeat(c.known(1))


@row("Range")
def _range(c: OnnxCall) -> Result:
    """A range of known length; None if the length depends on data."""
    known = all(c.tensor(n).array is not None for n in range(3))
    return torch.arange(c.one(0), c.one(1), c.one(2), dtype=TORCH_DTYPES[c.tensor(0).dtype]) if known else None


@row("ConstantOfShape")
def _constant_of_shape(c: OnnxCall) -> Result:
    shape, given = tuple(int(size) for size in c.known(0)), c.get("value")
    (number,), dtype = ([0.0], torch.float32) if given is None else (flat(given), given.dtype)
    if min(shape, default=0) < 0:
        raise ValueError(f"{shape} has negative sizes")
    if math.prod(shape) > _KEPT:
        return torch.full(shape, number, dtype=dtype)
    with parts.without_modes():
        return torch.full(shape, number, dtype=dtype)


_KEPT: Final = 65536
"""Largest number of elements of a uniform constant whose numbers are kept: masks and shapes, no activations."""


@row("DepthToSpace", "SpaceToDepth")
def _depth(c: OnnxCall) -> Result:
    """Move blocks between image dims and channels, before or after the other channels."""
    x, b, mode = c.x(), int(c.get("blocksize", 1)), c.get("mode", "DCR")
    if x.dim() != 4 or (c.op == "SpaceToDepth" and mode != "DCR"):
        return None
    n, channels, h, w = x.shape
    if c.op == "SpaceToDepth":
        cut = x.reshape(n, channels, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4)
        return cut.reshape(n, channels * b * b, h // b, w // b)
    if mode == "DCR":
        cut = x.reshape(n, b, b, -1, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        cut = x.reshape(n, -1, b, b, h, w).permute(0, 1, 4, 2, 5, 3)
    return cut.reshape(n, -1, h * b, w * b)


def pad(x: torch.Tensor, before: Sequence[int], after: Sequence[int], value: float) -> torch.Tensor:
    """A tensor padded with a constant, by one number per dim and side."""
    return torch.constant_pad_nd(x, _pairs(before, after), value) if any(before) or any(after) else x


def _pairs(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """Pads in the order of PyTorch: both of the last dim first."""
    return tuple(n for pair in reversed(list(zip(before, after, strict=True))) for n in pair)


@row("Pad")
def _pad(c: OnnxCall) -> Result:
    x, pads, mode = c.x(), c.ints("pads", 1) or c.ints("paddings") or (), c.get("mode", "constant")
    rank, axes = x.dim(), c.axes(3) or tuple(range(x.dim()))
    before, after = [0] * rank, [0] * rank
    for n, axis in enumerate(axes):
        before[axis], after[axis] = pads[n], pads[n + len(axes)]
    if mode == "constant":
        given = c.known(2) if c.has(2) else []
        return pad(x, before, after, given[0] if given else float(c.get("value", 0.0)))
    last = max((n for n in range(rank) if not before[n] and not after[n]), default=-1) + 1
    if mode == "wrap" or rank - last > 3 or any(before[:last]) or min((*before, *after), default=0) < 0:
        return None
    name = f"{'reflection' if mode == 'reflect' else 'replication'}_pad{max(rank - last, 1)}d"
    return getattr(aten, name)(x, _pairs(before[last:], after[last:]))


_UPSAMPLED: Final[dict[tuple[str, int], Any]] = {
    ("nearest", 1): aten.upsample_nearest1d, ("nearest", 2): aten.upsample_nearest2d,
    ("nearest", 3): aten.upsample_nearest3d, ("linear", 1): aten.upsample_linear1d,
    ("linear", 2): aten.upsample_bilinear2d, ("linear", 3): aten.upsample_trilinear3d,
    ("cubic", 2): aten.upsample_bicubic2d,
}  # fmt: skip


@row("Resize", "Upsample")
def _resize(c: OnnxCall) -> Result:
    old = c.tensor(0).shape
    sizes, scales = _resized(c, len(old))
    mode, where = c.get("mode", "nearest"), c.get("coordinate_transformation_mode", "half_pixel")
    where = "asymmetric" if c.op == "Upsample" else where
    function = _UPSAMPLED.get((mode, len(old) - 2))
    if sizes is None or sizes[:2] != old[:2] or function is None or not _as_torch(c, mode, where, sizes, bool(scales)):
        return None
    aligned = [] if mode == "nearest" else [where == "align_corners"]
    return function.default(c.x(), sizes[2:], *aligned, *(scales[2:] if scales else (None,) * (len(old) - 2)))


def _as_torch(c: OnnxCall, mode: str, where: str, sizes: tuple[int, ...], scaled: bool) -> bool:
    """True if PyTorch has the interpolation; ONNX has more of them."""
    if c.get("antialias") or c.get("exclude_outside"):
        return False
    if mode == "nearest":
        rounding = "floor" if c.op == "Upsample" else c.get("nearest_mode", "round_prefer_floor")
        times = all(new % old == 0 for new, old in zip(sizes, c.tensor(0).shape, strict=True))
        half = where == "half_pixel" and rounding.startswith("round") and times
        return half or (where == "asymmetric" and rounding == "floor")
    if mode == "cubic" and c.get("cubic_coeff_a", -0.75) != -0.75:
        return False
    if where == "align_corners":
        return not scaled
    return where == "half_pixel" or (where == "pytorch_half_pixel" and 1 not in sizes[2:])


def _resized(c: OnnxCall, rank: int) -> tuple[tuple[int, ...] | None, tuple[float, ...]]:
    """Sizes and, if given, scales of the result; dims that are not in ``axes`` keep their size."""
    places = (2, 3) if c.op == "Resize" and c.version >= 11 else (1, 9)
    scales, sizes = (c.known(n) if c.has(n) else [] for n in places)
    scales = c.get("scales") or scales
    axes, out, full = c.axes(None) or tuple(range(rank)), list(c.tensor(0).shape), [1.0] * rank
    for axis, size in zip(axes, sizes, strict=bool(sizes)):
        out[axis] = int(size)
    if sizes:
        return (None if c.get("keep_aspect_ratio_policy", "stretch") != "stretch" else tuple(out)), ()
    for axis, scale in zip(axes, scales, strict=bool(scales)):
        full[axis], out[axis] = float(scale), math.floor(out[axis] * float(scale))
    return (tuple(out), tuple(full)) if scales else (None, ())


def _sequence(c: OnnxCall, members: Sequence[Tensor]) -> Tensor:
    return Tensor(c.outputs[0], (len(members),), "int64", parts=list(members))


def _members(c: OnnxCall) -> list[Tensor]:
    found = c.tensor(0).parts
    if found is None:
        raise ValueError(f"{c.tensor(0).name!r} is no sequence")
    return found


@row("SplitToSequence")
def _split_to_sequence(c: OnnxCall) -> Result:
    axis, given = c.axis(0), c.known(1) if c.has(1) else None
    size, sizes = c.tensor(0).shape[axis], [int(n) for n in given or ()]
    if given is None or not c.tensor(1).shape:
        each = sizes[0] if sizes else 1
        if each < 1:
            raise ValueError(f"parts cannot have {each} elements")
        if size > each * MAX_PARTS:
            raise ValueError(f"a sequence of {ceil_div(size, each)} tensors is too long; at most {MAX_PARTS}")
        sizes = [min(each, size - start) for start in range(0, size, each)]
    bare, dtype, name = given is None and not c.get("keepdims", 1), c.tensor(0).dtype, c.outputs[0]
    made = [one.squeeze(axis) if bare else one for one in torch.split_with_sizes(c.x(), sizes, axis)]
    return _sequence(c, [Tensor(f"{name}.{n}", tuple(one.shape), dtype, value=one) for n, one in enumerate(made)])


@row("SequenceInsert")
def _insert(c: OnnxCall) -> Result:
    members = list(_members(c))
    members.insert(int(c.one(2, len(members))), c.tensor(1))
    return _sequence(c, members)
