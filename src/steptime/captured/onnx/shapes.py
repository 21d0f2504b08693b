"""Rows of operators that show, cut, join and index tensors, and of sequences of tensors.

The length of a sequence is known, so it leaves no trace in the graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from steptime.captured.aten import layers, maths, views
from steptime.captured.aten.views import like, tensor_type
from steptime.captured.graph.program import Attribute, Nodes, TensorType, Value
from steptime.captured.onnx.call import OnnxCall, Result, row
from steptime.captured.onnx.tensor import MAX_PARTS, Tensor, dtype_of_array
from steptime.num import ceil_div


@row("Shape")
def _shape(call: OnnxCall) -> Result:
    shape = call.type().shape
    return np.array(shape[call.get("start", 0) : call.get("end", len(shape))], dtype=np.int64)


@row("Size")
def _size(call: OnnxCall) -> Result:
    return np.array(call.type().elements, dtype=np.int64)


@row("Reshape")
def _reshape(call: OnnxCall) -> Result:
    given = call.ints("shape", 1)
    if given is None:
        raise ValueError("no shape is given")
    shape, old = list(given), call.type().shape
    for n, size in enumerate(shape):
        if size == 0 and not call.get("allowzero"):
            shape[n] = old[n]
    if shape.count(-1) == 1:
        rest = math.prod(size for size in shape if size != -1)
        if not rest or call.type().elements % rest:
            raise ValueError(f"{call.type()} cannot be seen as {tuple(given)}")
        shape[shape.index(-1)] = call.type().elements // rest
    return views.reshape(call.nodes, call.value(), shape)


@row("Flatten")
def _flatten(call: OnnxCall) -> Result:
    axis = int(call.get("axis", 1))
    return views.flatten(call.nodes, call.value(), axis + call.type().rank if axis < 0 else axis)


@row("Transpose")
def _transpose(call: OnnxCall) -> Result:
    x = call.value()
    perm = call.ints("perm") or tuple(reversed(range(x.type.rank)))
    moved = [n for n, dim in enumerate(perm) if dim != n]
    if len(moved) == 2:
        return views.t(call.nodes, x) if x.type.rank == 2 else views.transpose(call.nodes, x, moved[0], moved[1])
    return views.permute(call.nodes, x, perm)


@row("Squeeze")
def _squeeze(call: OnnxCall) -> Result:
    axes = call.axes()
    return views.squeeze(call.nodes, call.value(), range(call.type().rank) if axes is None else axes)


@row("Unsqueeze")
def _unsqueeze(call: OnnxCall) -> Result:
    axes, x = call.ints("axes", 1) or (), call.value()
    rank = x.type.rank + len(axes)
    for axis in sorted(views.wrap(axis, rank) for axis in axes):
        x = views.unsqueeze(call.nodes, x, axis)
    return x


@row("Expand")
def _expand(call: OnnxCall) -> Result:
    shape = maths.broadcast(call.type().shape, tuple(int(n) for n in call.known(1)))
    return views.expand(call.nodes, call.value(), shape)


@row("Concat")
def _concat(call: OnnxCall) -> Result:
    if "axis" not in call.attributes:
        return views.cat(call.nodes, call.values(), 1)
    return views.cat(call.nodes, call.values(), call.axis(0))


@row("Split")
def _split(call: OnnxCall) -> Result:
    axis = call.axis(0)
    sizes, whole = call.ints("split", 1), call.type().shape[axis]
    if sizes is None:
        parts = len(call.outputs)
        each = -(-whole // parts)
        sizes = tuple(max(min(each, whole - each * n), 0) for n in range(parts))
    return views.split_with_sizes(call.nodes, call.value(), sizes, axis)


@row("Slice")
def _slice(call: OnnxCall) -> Result:
    starts, ends = call.ints("starts", 1), call.ints("ends", 2)
    if starts is None or ends is None:
        raise ValueError("starts and ends are missing")
    axes = call.axes(3) or tuple(range(len(starts)))
    steps = call.ints("steps", 4) or (1,) * len(starts)
    x = call.value()
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step < 0:
            size = x.type.shape[axis]
            x = call.nodes.apply("flip", {"self": x}, {"dims": (axis,)}, outputs=[like(x.type)]).value()
            start, end = size - 1 - _bound(start, size), size - 1 - _bound(end, size)
        x = views.slice(call.nodes, x, axis, start, end, abs(step))
    return x


def _bound(index: int, size: int) -> int:
    """Position of a slice that runs backwards; -1 stands before the first element."""
    return max(min(index + size if index < 0 else index, size - 1), -1)


@row("Gather")
def _gather(call: OnnxCall) -> Result:
    nodes, axis, indices = call.nodes, call.axis(0), call.tensor(1)
    if indices.array is not None and indices.array.size == 1 and indices.type.rank == 0:
        return views.select(nodes, call.value(), axis, int(indices.array.reshape(-1)[0]))
    if indices.array is not None and (indices.array < 0).any():
        counted = np.where(indices.array < 0, indices.array + call.type().shape[axis], indices.array)
        indices = Tensor.known(f"{indices.name} from the front", counted)
    table = call.weight(0)
    if axis == 0 and table.type.rank == 2 and indices.type.rank > 0:
        return layers.embedding(nodes, table, indices.of(nodes))
    index = indices.of(nodes)
    flat = index if index.type.rank == 1 else views.reshape(nodes, index, (index.type.elements,))
    shape = (*table.type.shape[:axis], index.type.elements, *table.type.shape[axis + 1 :])
    output = tensor_type(shape, table.type.dtype)
    found = nodes.apply("index_select", {"self": table, "index": flat}, {"dim": axis}, outputs=[output]).value()
    shape = (*table.type.shape[:axis], *index.type.shape, *table.type.shape[axis + 1 :])
    return views.reshape(nodes, found, shape)


@row("GatherElements")
def _gather_elements(call: OnnxCall) -> Result:
    x, index = call.value(), call.value(1)
    output = tensor_type(index.type.shape, x.type.dtype)
    return call.nodes.apply("gather", {"self": x, "index": index}, {"dim": call.axis(0)}, outputs=[output]).value()


@row("ScatterElements", "Scatter")
def _scatter(call: OnnxCall) -> Result:
    if call.get("reduction", "none") not in ("none", "add"):
        return None
    op = "scatter_add" if call.get("reduction") == "add" else "scatter"
    inputs = {"self": call.value(), "index": call.value(1), "src": call.value(2)}
    return call.nodes.apply(op, inputs, {"dim": call.axis(0)}, outputs=[like(call.type())]).value()


def _places(call: OnnxCall, indices: Value, depth: int) -> list[Value]:
    """Indices of each of the first dims of the data.

    Raises:
        ValueError: the data have fewer dims.
    """
    if depth > call.type().rank:
        raise ValueError(f"the last dim of its indices is {depth}, but its data have {call.type().rank} dims")
    return [views.select(call.nodes, indices, -1, n) for n in range(depth)]


@row("GatherND")
def _gather_nd(call: OnnxCall) -> Result:
    x, indices = call.value(), call.value(1)
    depth = indices.type.shape[-1] if indices.type.rank else 0
    if call.get("batch_dims") or not depth:
        return None
    parts = _places(call, indices, depth)
    output = tensor_type((*indices.type.shape[:-1], *x.type.shape[depth:]), x.type.dtype)
    return call.nodes.apply("index", {"self": x, "indices": parts}, outputs=[output]).value()


@row("ScatterND")
def _scatter_nd(call: OnnxCall) -> Result:
    if call.get("reduction", "none") not in ("none", "add"):
        return None
    indices = call.value(1)
    parts = _places(call, indices, indices.type.shape[-1])
    inputs: dict[str, Value | Sequence[Value] | None] = {
        "self": call.value(), "indices": parts, "values": call.value(2),
    }  # fmt: skip
    more: dict[str, Attribute] = {"accumulate": call.get("reduction") == "add"}
    return call.nodes.apply("index_put", inputs, more, outputs=[like(call.type())]).value()


@row("Tile")
def _tile(call: OnnxCall) -> Result:
    repeats = tuple(int(n) for n in call.known(1))
    shape = [size * n for size, n in zip(call.type().shape, repeats, strict=True)]
    output = tensor_type(shape, call.type().dtype)
    return call.nodes.apply("repeat", {"self": call.value()}, {"repeats": repeats}, outputs=[output]).value()


@row("ConstantOfShape")
def _constant_of_shape(call: OnnxCall) -> Result:
    shape = tuple(int(size) for size in call.known(0))
    given = call.get("value")
    array = np.zeros(1, np.float32) if given is None else given
    if math.prod(shape) <= _KEPT and min(shape, default=0) >= 0:
        return np.full(shape, array.reshape(-1)[0], dtype=array.dtype)
    return maths.full(call.nodes, shape, array.reshape(-1)[0].item(), dtype_of_array(array))


_KEPT = 65536
"""Elements of a constant of one number that is kept as an array: masks and shapes, no activations."""


@row("Trilu")
def _trilu(call: OnnxCall) -> Result:
    k = call.maybe_known(1)
    diagonal = 0 if k is None else int(k.reshape(-1)[0])
    op = "triu" if call.get("upper", 1) else "tril"
    return call.nodes.apply(op, {"self": call.value()}, {"diagonal": diagonal}, outputs=[like(call.type())]).value()


@row("DepthToSpace", "SpaceToDepth")
def _depth(call: OnnxCall) -> Result:
    nodes, x, block = call.nodes, call.value(), int(call.get("blocksize", 1))
    if call.op == "SpaceToDepth" and call.get("mode", "DCR") != "DCR":
        return None
    n, c, h, w = x.type.shape
    if call.op == "SpaceToDepth":
        cut = views.reshape(nodes, x, (n, c, h // block, block, w // block, block))
        return views.reshape(
            nodes, views.permute(nodes, cut, (0, 3, 5, 1, 2, 4)), (n, c * block * block, h // block, w // block)
        )
    inner = c // block**2
    if call.get("mode", "DCR") == "DCR":
        cut = views.permute(nodes, views.reshape(nodes, x, (n, block, block, inner, h, w)), (0, 3, 4, 1, 5, 2))
    else:
        cut = views.permute(nodes, views.reshape(nodes, x, (n, inner, block, block, h, w)), (0, 1, 4, 2, 5, 3))
    return views.reshape(nodes, cut, (n, inner, h * block, w * block))


def pad(nodes: Nodes, x: Value, before: Sequence[int], after: Sequence[int], value: float) -> Value:
    """``constant_pad_nd``; one number per dim and side."""
    if not any(before) and not any(after):
        return x
    attributes: dict[str, Attribute] = {"pad": _flat(before, after), "value": value}
    return nodes.apply("constant_pad_nd", {"self": x}, attributes, outputs=[_padded(x, before, after)]).value()


def _flat(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """Pads as PyTorch takes them: both of the last dim first."""
    return tuple(n for pair in reversed(list(zip(before, after, strict=True))) for n in pair)


def _padded(x: Value, before: Sequence[int], after: Sequence[int]) -> TensorType:
    shape = [size + a + b for size, a, b in zip(x.type.shape, before, after, strict=True)]
    return tensor_type(shape, x.type.dtype)


@row("Pad")
def _pad(call: OnnxCall) -> Result:
    x, pads = call.value(), call.ints("pads", 1) or call.ints("paddings") or ()
    axes = call.axes(3) or tuple(range(x.type.rank))
    before, after = [0] * x.type.rank, [0] * x.type.rank
    for n, axis in enumerate(axes):
        before[axis], after[axis] = pads[n], pads[n + len(axes)]
    mode = call.get("mode", "constant")
    if mode == "constant":
        given = call.maybe_known(2)
        value = float(call.get("value", 0.0)) if given is None or not given.size else given.reshape(-1)[0].item()
        return pad(call.nodes, x, before, after, value)
    last = max((n for n in range(x.type.rank) if not before[n] and not after[n]), default=-1) + 1
    rank = x.type.rank - last
    if mode == "wrap" or rank > 3 or any(before[:last]) or min((*before, *after), default=0) < 0:
        return None
    op = f"{'reflection' if mode == 'reflect' else 'replication'}_pad{max(rank, 1)}d"
    padding, output = _flat(before[last:], after[last:]), _padded(x, before, after)
    return call.nodes.apply(op, {"self": x}, {"padding": padding}, outputs=[output]).value()


@row("Resize", "Upsample")
def _resize(call: OnnxCall) -> Result:
    x, old = call.value(), call.type().shape
    sizes, scales = _resized(call, len(old))
    if sizes is None or sizes[:2] != old[:2] or len(old) not in (3, 4, 5):
        return None
    mode, where = call.get("mode", "nearest"), call.get("coordinate_transformation_mode", "half_pixel")
    if call.op == "Upsample":
        where = "asymmetric"
    if not _as_torch(call, mode, where, sizes, scales is not None):
        return None
    rank, spatial = len(old) - 2, sizes[2:]
    names = {("nearest", n): f"upsample_nearest{n}d" for n in (1, 2, 3)}
    names |= {("linear", 1): "upsample_linear1d", ("linear", 2): "upsample_bilinear2d"}
    names |= {("linear", 3): "upsample_trilinear3d", ("cubic", 2): "upsample_bicubic2d"}
    op = names.get((mode, rank))
    if op is None:
        return None
    attributes: dict[str, Attribute] = {"output_size": spatial}
    if mode != "nearest":
        attributes["align_corners"] = where == "align_corners"
    suffix = ("w",) if rank == 1 else ("h", "w") if rank == 2 else ("d", "h", "w")
    for name, scale in zip(suffix, scales[2:] if scales else (), strict=False):
        attributes["scales" if rank == 1 else f"scales_{name}"] = scale
    output = tensor_type(sizes, x.type.dtype)
    return call.nodes.apply(op, {"self": x}, attributes, outputs=[output]).value()


def _as_torch(call: OnnxCall, mode: str, where: str, sizes: tuple[int, ...], scaled: bool) -> bool:
    """Whether PyTorch has that interpolation; files have more of them."""
    if call.get("antialias") or call.get("exclude_outside"):
        return False
    if mode == "nearest":
        floors = call.op == "Upsample" or call.get("nearest_mode", "round_prefer_floor") == "floor"
        times = all(new % old == 0 for new, old in zip(sizes, call.type().shape, strict=True))
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
    scales, sizes = (call.maybe_known(n) for n in places)
    if call.get("scales") is not None:
        scales = np.array(call.get("scales"))
    axes = call.axes(None) or tuple(range(rank))
    out = list(call.type().shape)
    if sizes is not None and sizes.size:
        for axis, size in zip(axes, sizes, strict=True):
            out[axis] = int(size)
        return (None if call.get("keep_aspect_ratio_policy", "stretch") != "stretch" else tuple(out)), None
    if scales is None or not scales.size:
        return None, None
    full = [1.0] * rank
    for axis, scale in zip(axes, scales, strict=True):
        full[axis] = float(scale)
        out[axis] = math.floor(out[axis] * float(scale))
    return tuple(out), tuple(full)


def _sequence(call: OnnxCall, parts: Sequence[Tensor]) -> Tensor:
    return Tensor(call.outputs[0], TensorType((len(parts),), "int64"), parts=list(parts))


def _parts(call: OnnxCall) -> list[Tensor]:
    parts = call.tensor(0).parts
    if parts is None:
        raise ValueError(f"{call.tensor(0).name!r} is no sequence")
    return parts


@row("SplitToSequence")
def _split_to_sequence(call: OnnxCall) -> Result:
    axis, given = call.axis(0), call.maybe_known(1)
    size = call.type().shape[axis]
    if given is None or given.ndim == 0:
        each = 1 if given is None else int(given)
        if each < 1:
            raise ValueError(f"parts cannot have {each} elements")
        if size > each * MAX_PARTS:
            raise ValueError(f"a sequence of {ceil_div(size, each)} tensors is too long; at most {MAX_PARTS}")
        sizes = [min(each, size - start) for start in range(0, size, each)]
    else:
        sizes = [int(n) for n in given]
    made: Sequence[Value] = views.split_with_sizes(call.nodes, call.value(), sizes, axis)
    if given is None and not call.get("keepdims", 1):
        made = [views.squeeze(call.nodes, part, (axis,)) for part in made]
    return _sequence(call, [Tensor.of_value(f"{call.outputs[0]}.{n}", part) for n, part in enumerate(made)])


@row("SequenceConstruct")
def _construct(call: OnnxCall) -> Result:
    return _sequence(call, [call.tensor(n) for n in range(len(call.inputs))])


@row("SequenceEmpty")
def _empty(call: OnnxCall) -> Result:
    return _sequence(call, [])


@row("SequenceInsert")
def _insert(call: OnnxCall) -> Result:
    parts, place = list(_parts(call)), call.maybe_known(2)
    parts.insert(len(parts) if place is None else int(place.reshape(-1)[0]), call.tensor(1))
    return _sequence(call, parts)


@row("SequenceAt")
def _at(call: OnnxCall) -> Result:
    return _parts(call)[int(call.known(1).reshape(-1)[0])]


@row("SequenceLength")
def _length(call: OnnxCall) -> Result:
    return np.array(len(_parts(call)), dtype=np.int64)


@row("ConcatFromSequence")
def _concat_from_sequence(call: OnnxCall) -> Result:
    parts = [part.of(call.nodes) for part in _parts(call)]
    join = views.stack if call.get("new_axis") else views.cat
    return join(call.nodes, parts, int(call.get("axis", 0)))
