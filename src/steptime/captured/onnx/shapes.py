"""Rows of operators that show, cut, join and index tensors, and of sequences of tensors.

The length of a sequence is known, so it leaves no trace in the graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from steptime.captured import torch_parts as parts
from steptime.captured.graph.strides import broadcast, wrap
from steptime.captured.onnx.call import OnnxCall, Result, real, row
from steptime.captured.onnx.elementwise import flattened
from steptime.captured.onnx.tensor import MAX_PARTS, Tensor, flat
from steptime.num import ceil_div

aten = torch.ops.aten


@row("Shape")
def _shape(call: OnnxCall) -> Result:
    shape = call.tensor(0).shape
    return real(shape[call.get("start", 0) : call.get("end", len(shape))])


@row("Size")
def _size(call: OnnxCall) -> Result:
    return real(math.prod(call.tensor(0).shape))


@row("Reshape")
def _reshape(call: OnnxCall) -> Result:
    x, given = call.x(), call.ints("shape", 1)
    if given is None:
        raise ValueError("no shape is given")
    keep = not call.get("allowzero")
    return x.reshape([x.shape[n] if size == 0 and keep else size for n, size in enumerate(given)])


@row("Flatten")
def _flatten(call: OnnxCall) -> Result:
    axis = int(call.get("axis", 1))
    return flattened(call.x(), axis + len(call.tensor(0).shape) if axis < 0 else axis)


@row("Transpose")
def _transpose(call: OnnxCall) -> Result:
    x = call.x()
    perm = call.ints("perm") or tuple(reversed(range(x.dim())))
    moved = [n for n, dim in enumerate(perm) if dim != n]
    if len(moved) == 2 and sorted(perm) == list(range(x.dim())):
        return x.t() if x.dim() == 2 else x.transpose(*moved)
    return x.permute(perm)


@row("Squeeze")
def _squeeze(call: OnnxCall) -> Result:
    axes = call.axes()
    return call.x().squeeze() if axes is None else call.x().squeeze(axes)


@row("Unsqueeze")
def _unsqueeze(call: OnnxCall) -> Result:
    axes, x = call.ints("axes", 1) or (), call.x()
    rank = x.dim() + len(axes)
    for axis in sorted(wrap(axis, rank) for axis in axes):
        x = x.unsqueeze(axis)
    return x


@row("Expand")
def _expand(call: OnnxCall) -> Result:
    return expanded(call.x(), broadcast(call.tensor(0).shape, tuple(call.known(1))))


def expanded(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor in a shape that it broadcasts to."""
    return x if x.shape == shape else x.expand(shape)


@row("Concat")
def _concat(call: OnnxCall) -> Result:
    return torch.cat(call.all(), call.axis(1 if "axis" not in call.attributes else 0))


@row("Split")
def _split(call: OnnxCall) -> Result:
    axis, sizes = call.axis(0), call.ints("split", 1)
    if sizes is None:
        count, whole = int(call.get("num_outputs", len(call.outputs))), call.tensor(0).shape[axis]
        each = -(-whole // count)
        sizes = tuple(max(min(each, whole - each * n), 0) for n in range(count))
    return torch.split_with_sizes(call.x(), sizes, axis)


@row("Slice")
def _slice(call: OnnxCall) -> Result:
    starts, ends = call.ints("starts", 1), call.ints("ends", 2)
    if starts is None or ends is None:
        raise ValueError("starts and ends are missing")
    axes, steps = call.axes(3) or tuple(range(len(starts))), call.ints("steps", 4) or (1,) * len(starts)
    x = call.x()
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step < 0:
            size = x.shape[axis]
            x, start, end = x.flip((axis,)), size - 1 - _bound(start, size), size - 1 - _bound(end, size)
        x = aten.slice(x, axis, start, end, abs(step))
    return x


def _bound(index: int, size: int) -> int:
    """Position of a slice that runs backwards; -1 stands before the first element."""
    return max(min(index + size if index < 0 else index, size - 1), -1)


@row("Gather")
def _gather(call: OnnxCall) -> Result:
    axis, indices = call.axis(0), call.tensor(1)
    if indices.array is not None and not indices.shape:
        return call.x().select(axis, call.one(1))
    if indices.array is not None and min(flat(indices.array), default=0) < 0:
        size = call.tensor(0).shape[axis]
        with parts.without_modes():
            counted = torch.where(indices.array < 0, indices.array + size, indices.array)
        call.inputs[1] = Tensor(f"{indices.name} from the front", indices.shape, indices.dtype, array=counted)
    table, index = call.weight(0), call.x(1)
    if axis == 0 and table.dim() == 2 and index.dim() > 0:
        return F.embedding(index, table)
    found = table.index_select(axis, index if index.dim() == 1 else index.reshape(-1))
    return found.reshape((*table.shape[:axis], *index.shape, *table.shape[axis + 1 :]))


@row("GatherElements")
def _gather_elements(call: OnnxCall) -> Result:
    return torch.gather(call.x(), call.axis(0), call.x(1))


@row("ScatterElements", "Scatter")
def _scatter(call: OnnxCall) -> Result:
    if call.get("reduction", "none") not in ("none", "add"):
        return None
    function = torch.scatter_add if call.get("reduction") == "add" else torch.scatter
    return function(call.x(), call.axis(0), call.x(1), call.x(2))


def _places(call: OnnxCall, depth: int) -> list[torch.Tensor]:
    """Indices of each of the first dims of the data.

    Raises:
        ValueError: the data have fewer dims.
    """
    rank = len(call.tensor(0).shape)
    if depth > rank:
        raise ValueError(f"the last dim of its indices is {depth}, but its data have {rank} dims")
    return [call.x(1).select(-1, n) for n in range(depth)]


@row("GatherND")
def _gather_nd(call: OnnxCall) -> Result:
    shape = call.tensor(1).shape
    if call.get("batch_dims") or not shape or not shape[-1]:
        return None
    return aten.index(call.x(), _places(call, shape[-1]))


@row("ScatterND")
def _scatter_nd(call: OnnxCall) -> Result:
    if call.get("reduction", "none") not in ("none", "add"):
        return None
    places = _places(call, call.tensor(1).shape[-1])
    return torch.index_put(call.x(), tuple(places), call.x(2), accumulate=call.get("reduction") == "add")


@row("Tile")
def _tile(call: OnnxCall) -> Result:
    if len(call.known(1)) != len(call.tensor(0).shape):
        raise ValueError("a repeat for each dim is needed")
    return call.x().repeat(call.known(1))


@row("Range")
def _range(call: OnnxCall) -> Result:
    return torch.arange(call.one(0), call.one(1), call.one(2), dtype=call.x().dtype)


@row("ConstantOfShape")
def _constant_of_shape(call: OnnxCall) -> Result:
    shape, given = tuple(int(size) for size in call.known(0)), call.get("value")
    (number,), dtype = ([0.0], torch.float32) if given is None else (flat(given), given.dtype)
    if min(shape, default=0) < 0:
        raise ValueError(f"{shape} has negative sizes")
    if math.prod(shape) > _KEPT:
        return torch.full(shape, number, dtype=dtype)
    with parts.without_modes():
        return torch.full(shape, number, dtype=dtype)


_KEPT = 65536
"""Elements of a constant of one number whose numbers are kept: masks and shapes, no activations."""


@row("Trilu")
def _trilu(call: OnnxCall) -> Result:
    return (torch.triu if call.get("upper", 1) else torch.tril)(call.x(), int(call.one(1, 0)))


@row("DepthToSpace", "SpaceToDepth")
def _depth(call: OnnxCall) -> Result:
    x, block, mode = call.x(), int(call.get("blocksize", 1)), call.get("mode", "DCR")
    if x.dim() != 4 or (call.op == "SpaceToDepth" and mode != "DCR"):
        return None
    n, c, h, w = x.shape
    if call.op == "SpaceToDepth":
        cut = x.reshape(n, c, h // block, block, w // block, block).permute(0, 3, 5, 1, 2, 4)
        return cut.reshape(n, c * block * block, h // block, w // block)
    inner = c // block**2
    if mode == "DCR":
        cut = x.reshape(n, block, block, inner, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        cut = x.reshape(n, inner, block, block, h, w).permute(0, 1, 4, 2, 5, 3)
    return cut.reshape(n, inner, h * block, w * block)


def pad(x: torch.Tensor, before: Sequence[int], after: Sequence[int], value: float) -> torch.Tensor:
    """A constant around a tensor; one number per dim and side."""
    return torch.constant_pad_nd(x, _pairs(before, after), value) if any(before) or any(after) else x


def _pairs(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """Pads as PyTorch takes them: both of the last dim first."""
    return tuple(n for pair in reversed(list(zip(before, after, strict=True))) for n in pair)


@row("Pad")
def _pad(call: OnnxCall) -> Result:
    x, pads = call.x(), call.ints("pads", 1) or call.ints("paddings") or ()
    rank, axes, mode = x.dim(), call.axes(3) or tuple(range(x.dim())), call.get("mode", "constant")
    before, after = [0] * rank, [0] * rank
    for n, axis in enumerate(axes):
        before[axis], after[axis] = pads[n], pads[n + len(axes)]
    if mode == "constant":
        given = call.known(2) if call.has(2) else []
        return pad(x, before, after, given[0] if given else float(call.get("value", 0.0)))
    last = max((n for n in range(rank) if not before[n] and not after[n]), default=-1) + 1
    if mode == "wrap" or rank - last > 3 or any(before[:last]) or min((*before, *after), default=0) < 0:
        return None
    dims = max(rank - last, 1)
    function = getattr(aten, f"{'reflection' if mode == 'reflect' else 'replication'}_pad{dims}d")
    return function(x, _pairs(before[last:], after[last:]))


@row("Resize", "Upsample")
def _resize(call: OnnxCall) -> Result:
    old = call.tensor(0).shape
    sizes, scales = _resized(call, len(old))
    if sizes is None or sizes[:2] != old[:2] or len(old) not in (3, 4, 5):
        return None
    mode, where = call.get("mode", "nearest"), call.get("coordinate_transformation_mode", "half_pixel")
    where = "asymmetric" if call.op == "Upsample" else where
    if not _as_torch(call, mode, where, sizes, scales is not None):
        return None
    rank = len(old) - 2
    names = {("nearest", n): f"upsample_nearest{n}d" for n in (1, 2, 3)}
    names |= {("linear", 1): "upsample_linear1d", ("linear", 2): "upsample_bilinear2d"}
    names |= {("linear", 3): "upsample_trilinear3d", ("cubic", 2): "upsample_bicubic2d"}
    if (mode, rank) not in names:
        return None
    aligned = [] if mode == "nearest" else [where == "align_corners"]
    function = getattr(aten, names[mode, rank]).default
    return function(call.x(), sizes[2:], *aligned, *(scales[2:] if scales else (None,) * rank))


def _as_torch(call: OnnxCall, mode: str, where: str, sizes: tuple[int, ...], scaled: bool) -> bool:
    """Whether PyTorch has that interpolation; files have more of them."""
    if call.get("antialias") or call.get("exclude_outside"):
        return False
    if mode == "nearest":
        floors = call.op == "Upsample" or call.get("nearest_mode", "round_prefer_floor") == "floor"
        times = all(new % old == 0 for new, old in zip(sizes, call.tensor(0).shape, strict=True))
        rounds = where == "half_pixel" and call.get("nearest_mode", "round_prefer_floor").startswith("round")
        return (where == "asymmetric" and floors) or (rounds and times)
    if mode == "cubic" and call.get("cubic_coeff_a", -0.75) != -0.75:
        return False
    if where == "align_corners":
        return not scaled
    return where == "half_pixel" or (where == "pytorch_half_pixel" and 1 not in sizes[2:])


def _resized(call: OnnxCall, rank: int) -> tuple[tuple[int, ...] | None, tuple[float, ...] | None]:
    """Sizes and, where they are given, scales; dims that ``axes`` leaves out stay."""
    places = {"Upsample": (1, 9)}.get(call.op, (1, 9) if call.version < 11 else (2, 3))
    scales, sizes = (call.known(n) if call.has(n) else [] for n in places)
    scales = call.get("scales") or scales
    axes, out = call.axes(None) or tuple(range(rank)), list(call.tensor(0).shape)
    if sizes:
        for axis, size in zip(axes, sizes, strict=True):
            out[axis] = int(size)
        return (None if call.get("keep_aspect_ratio_policy", "stretch") != "stretch" else tuple(out)), None
    if not scales:
        return None, None
    full = [1.0] * rank
    for axis, scale in zip(axes, scales, strict=True):
        full[axis] = float(scale)
        out[axis] = math.floor(out[axis] * float(scale))
    return tuple(out), tuple(full)


def _sequence(call: OnnxCall, members: Sequence[Tensor]) -> Tensor:
    return Tensor(call.outputs[0], (len(members),), "int64", parts=list(members))


def _parts(call: OnnxCall) -> list[Tensor]:
    found = call.tensor(0).parts
    if found is None:
        raise ValueError(f"{call.tensor(0).name!r} is no sequence")
    return found


@row("SplitToSequence")
def _split_to_sequence(call: OnnxCall) -> Result:
    axis, given = call.axis(0), call.known(1) if call.has(1) else None
    size = call.tensor(0).shape[axis]
    if given is None or not call.tensor(1).shape:
        each = 1 if given is None else int(given[0])
        if each < 1:
            raise ValueError(f"parts cannot have {each} elements")
        if size > each * MAX_PARTS:
            raise ValueError(f"a sequence of {ceil_div(size, each)} tensors is too long; at most {MAX_PARTS}")
        given_sizes = [min(each, size - start) for start in range(0, size, each)]
    else:
        given_sizes = [int(n) for n in given]
    made = torch.split_with_sizes(call.x(), given_sizes, axis)
    dtype, bare = call.tensor(0).dtype, given is None and not call.get("keepdims", 1)
    members = [one.squeeze(axis) if bare else one for one in made]
    name = call.outputs[0]
    return _sequence(call, [Tensor(f"{name}.{n}", tuple(one.shape), dtype, value=one) for n, one in enumerate(members)])


@row("SequenceConstruct", "SequenceEmpty")
def _construct(call: OnnxCall) -> Result:
    return _sequence(call, [call.tensor(n) for n in range(len(call.inputs))])


@row("SequenceInsert")
def _insert(call: OnnxCall) -> Result:
    members = list(_parts(call))
    members.insert(int(call.one(2, len(members))), call.tensor(1))
    return _sequence(call, members)


@row("SequenceAt")
def _at(call: OnnxCall) -> Result:
    return _parts(call)[int(call.one(1))]


@row("SequenceLength")
def _length(call: OnnxCall) -> Result:
    return real(len(_parts(call)))


@row("ConcatFromSequence")
def _concat_from_sequence(call: OnnxCall) -> Result:
    members = [call.live(part, "constant") for part in _parts(call)]
    return (torch.stack if call.get("new_axis") else torch.cat)(members, int(call.get("axis", 0)))
