"""How each operator of a graph is written in ONNX: one row per operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from steptime.captured.graph import Attribute, Node, Value
from steptime.captured.graph.strides import wrap
from steptime.errors import UserError
from steptime.rewrite.onnx_emitter import CODES, Emitter

Row = Callable[[Emitter, Node], "str | Sequence[str | None]"]


def _ints(node: Node, name: str, default: Sequence[int] = ()) -> list[int]:
    found = node.attribute(name)
    if found is None:
        return list(default)
    return [int(str(item)) for item in found] if isinstance(found, tuple) else [int(str(found))]


def _int(node: Node, name: str, default: int) -> int:
    return next(iter(_ints(node, name, [default])))


def _float(node: Node, name: str, default: float) -> float:
    found = node.attribute(name)
    return default if not isinstance(found, (int, float)) else float(found)


def _first(node: Node) -> Value:
    return node.inputs[0]


def _unary(op: str, **attributes: Any) -> Row:
    return lambda e, node: e.emit(op, [e.name(_first(node))], **attributes)


def _binary(op: str) -> Row:
    """Both operands in one element type; ``alpha`` times the second."""

    def row(e: Emitter, node: Node) -> str:
        floats = [value.type.dtype for value in node.inputs]
        dtype = node.outputs[0].dtype if node.outputs[0].dtype != "bool" else max(floats, key=_rank)
        a, b = e.operand(node, "self", dtype), e.operand(node, "other", dtype)
        if _float(node, "alpha", 1.0) != 1.0:
            b = e.emit("Mul", [b, e.scalar(_float(node, "alpha", 1.0), dtype)])
        return e.emit(op, [b, a] if node.op == "rsub" else [a, b])

    return row


def _rank(dtype: str) -> int:
    return ("bool", "uint8", "int8", "int16", "int32", "int64", "fp16", "bf16", "fp32", "fp64").index(dtype)


def _division(e: Emitter, node: Node) -> str:
    made = _binary("Div")(e, node)
    mode = node.attribute("rounding_mode")
    if mode is None and node.op != "floor_divide":
        return str(made)
    return e.emit("Floor", [str(made)]) if mode != "trunc" else str(made)


def _power(e: Emitter, node: Node) -> str:
    return e.emit(
        "Pow", [e.operand(node, "self", node.outputs[0].dtype), e.operand(node, "exponent", node.outputs[0].dtype)]
    )


def _where(e: Emitter, node: Node) -> str:
    dtype = node.outputs[0].dtype
    return e.emit("Where", [e.of(node, "condition"), e.operand(node, "self", dtype), e.operand(node, "other", dtype)])


def _masked_fill(e: Emitter, node: Node) -> str:
    return e.emit("Where", [e.of(node, "mask"), e.operand(node, "value", node.outputs[0].dtype), e.of(node, "self")])


def _clip(e: Emitter, node: Node) -> str:
    dtype = node.outputs[0].dtype
    ends = [e.operand(node, n, dtype) if node.input(n) or node.attribute(n) is not None else "" for n in _ends(node)]
    while ends and not ends[-1]:
        ends.pop()
    return e.emit("Clip", [e.name(_first(node)), *ends])


def _ends(node: Node) -> tuple[str, str]:
    return ("min_val", "max_val") if node.op == "hardtanh" else ("min", "max")


def _cast(e: Emitter, node: Node) -> str:
    x = _first(node)
    return e.cast(e.name(x), x.type.dtype, node.outputs[0].dtype)


def _product(e: Emitter, node: Node) -> str:
    """A product; one by heads as ONNX has it, since its runtimes look for numbers and softmax right behind it."""
    a, b = node.inputs[-2:]
    left, right = _by_head(a), _by_head(b)
    if left is None or right is None or left.type.shape[:2] != right.type.shape[:2]:
        return e.emit("MatMul", [e.name(a), e.name(b)])
    shape, made = (*left.type.shape[:2], *node.outputs[0].shape[1:]), node.outputs[0].shape
    name = e.shown[node.value(), shape] = e.emit("MatMul", [e.name(left), e.name(right)])
    return e.emit("Reshape", [name, e.numbers(made)])


_HEADS: Final = ("view", "_unsafe_view", "_reshape_alias", "expand", "clone")


def _by_head(value: Value) -> Value | None:
    """What a batch of matrices was as (batch, heads, rows, columns), None where it never was."""
    type, seen = value.type, value
    while seen.node.op in _HEADS and seen.node.inputs[0].type.elements == type.elements:
        seen = seen.node.inputs[0]
        shape = seen.type.shape
        if len(shape) == 4 and shape[0] * shape[1] == type.shape[0] and shape[2:] == type.shape[1:]:
            while seen.node.op in ("expand", "clone") and seen.node.inputs[0].type.shape == shape:
                seen = seen.node.inputs[0]
            return seen
    return None


def _gemm(e: Emitter, node: Node) -> str:
    a, b = node.inputs[-2:]
    turned = b.node.op == "t"
    right = e.name(b.node.inputs[0] if turned else b)
    return e.emit(
        "Gemm",
        [e.name(a), right, e.name(_first(node))],
        transB=int(turned) or None,
        alpha=_float(node, "alpha", 1.0),
        beta=_float(node, "beta", 1.0),
    )


def _batched(e: Emitter, node: Node) -> str:
    if _float(node, "alpha", 1.0) != 1.0 or _float(node, "beta", 1.0) != 1.0:
        raise UserError("baddbmm with factors cannot be written as ONNX")
    return e.emit("Add", [_product(e, node), e.name(_first(node))])


def _reshape(e: Emitter, node: Node) -> str:
    known = e.shown.get((_first(node), node.outputs[0].shape))
    if known is not None:
        return known
    return e.emit("Reshape", [e.name(_first(node)), e.numbers(node.outputs[0].shape)])


def _order(e: Emitter, node: Node) -> str:
    rank = _first(node).type.rank
    dims = list(range(rank))
    if node.op == "permute":
        dims = [wrap(dim, rank) for dim in _ints(node, "dims")]
    else:
        a, b = (0, 1) if node.op == "t" else (wrap(_int(node, name, 0), rank) for name in ("dim0", "dim1"))
        if rank > 1:
            dims[a], dims[b] = dims[b], dims[a]
    return e.emit("Transpose", [e.name(_first(node))], perm=dims)


def _expand(e: Emitter, node: Node) -> str:
    return e.emit("Expand", [e.name(_first(node)), e.numbers(node.outputs[0].shape)])


def _unsqueeze(e: Emitter, node: Node) -> str:
    dim = wrap(_int(node, "dim", 0), node.outputs[0].rank)
    return e.emit("Unsqueeze", [e.name(_first(node)), e.numbers([dim])])


def _slice(e: Emitter, node: Node) -> str:
    x = _first(node)
    dim = wrap(_int(node, "dim", 0), x.type.rank)
    start, end = _int(node, "start", 0), min(_int(node, "end", x.type.shape[dim]), x.type.shape[dim])
    given = [e.numbers([number]) for number in (start, end, dim, _int(node, "step", 1))]
    return e.emit("Slice", [e.name(x), *given])


def _select(e: Emitter, node: Node) -> str:
    x = _first(node)
    dim, index = wrap(_int(node, "dim", 0), x.type.rank), _int(node, "index", 0)
    return e.emit("Gather", [e.name(x), e.tensor(np.array(index, dtype=np.int64))], axis=dim)


def _split(e: Emitter, node: Node) -> list[str]:
    x = _first(node)
    dim = wrap(_int(node, "dim", 0), x.type.rank)
    if node.op == "unbind":
        at = (e.tensor(np.array(n, dtype=np.int64)) for n in range(len(node.outputs)))
        return [e.emit("Gather", [e.name(x), index], axis=dim) for index in at]
    sizes = [type.shape[dim] for type in node.outputs]
    name = e.emit("Split", [e.name(x), e.numbers(sizes)], outputs=len(sizes), axis=dim)
    return [name, *(f"{name}.{index}" for index in range(1, len(sizes)))]


def _cat(e: Emitter, node: Node) -> str:
    parts = [value for value in node.inputs if value.type.rank == node.outputs[0].rank]
    dtype = node.outputs[0].dtype
    dim = wrap(_int(node, "dim", 0), node.outputs[0].rank)
    return e.emit("Concat", [e.cast(e.name(value), value.type.dtype, dtype) for value in parts], axis=dim)


def _stack(e: Emitter, node: Node) -> str:
    dim = wrap(_int(node, "dim", 0), node.outputs[0].rank)
    dtype, at = node.outputs[0].dtype, e.numbers([dim])
    parts = [e.emit("Unsqueeze", [e.cast(e.name(x), x.type.dtype, dtype), at]) for x in node.inputs]
    return e.emit("Concat", parts, axis=dim)


def _variance(e: Emitter, node: Node) -> str:
    """The mean of the squares of what differs from the mean, times n / (n - correction)."""
    x = _first(node)
    dims = sorted(wrap(dim, x.type.rank) for dim in _ints(node, "dim")) or list(range(x.type.rank))
    count = math.prod(x.type.shape[dim] for dim in dims)
    given = node.attribute("unbiased")
    correction = _float(node, "correction", 1.0) if given is None else float(bool(given))
    centred = e.emit("Sub", [e.name(x), e.emit("ReduceMean", [e.name(x), e.numbers(dims)], keepdims=1)])
    keep = int(bool(node.attribute("keepdim", False)))
    mean = e.emit("ReduceMean", [e.emit("Mul", [centred, centred]), e.numbers(dims)], keepdims=keep)
    factor = count / max(count - correction, 0.0) if count > correction else math.nan
    return mean if factor == 1.0 else e.emit("Mul", [mean, e.scalar(factor, x.type.dtype)])


def _unequal(e: Emitter, node: Node) -> str:
    return e.emit("Not", [str(_binary("Equal")(e, node))])


def _repeat(e: Emitter, node: Node) -> str:
    times, x = _ints(node, "repeats"), _first(node)
    ones = e.emit("Reshape", [e.name(x), e.numbers((1,) * (len(times) - x.type.rank) + x.type.shape)])
    return e.emit("Tile", [ones, e.numbers(times)])


def _index_select(e: Emitter, node: Node) -> str:
    return e.emit("Gather", [e.of(node, "self"), e.of(node, "index")], axis=_int(node, "dim", 0))


def _softmax(e: Emitter, node: Node) -> str:
    x = _first(node)
    op = "LogSoftmax" if "log" in node.op else "Softmax"
    return e.emit(op, [e.name(x)], axis=wrap(_int(node, "dim", -1), x.type.rank))


def _reduce(op: str) -> Row:
    def row(e: Emitter, node: Node) -> str:
        x = _first(node)
        dims = [wrap(dim, x.type.rank) for dim in _ints(node, "dim")] or list(range(x.type.rank))
        keep = int(bool(node.attribute("keepdim", False)))
        name = e.cast(e.name(x), x.type.dtype, node.outputs[0].dtype)
        return e.emit(op, [name, e.numbers(sorted(dims))], keepdims=keep)

    return row


def _arg(op: str) -> Row:
    def row(e: Emitter, node: Node) -> str:
        keep = int(bool(node.attribute("keepdim", False)))
        return e.emit(op, [e.name(_first(node))], axis=_int(node, "dim", 0), keepdims=keep)

    return row


def _layer_norm(e: Emitter, node: Node) -> str:
    x, shape = _first(node), _ints(node, "normalized_shape")
    weight = e.of(node, "weight") or e.tensor(np.ones(shape, dtype=_numpy(x.type.dtype)))
    inputs = [e.name(x), weight, *([e.of(node, "bias")] if node.input("bias") else [])]
    return e.emit("LayerNormalization", inputs, axis=-len(shape), epsilon=_float(node, "eps", 1e-5))


def _rms_norm(e: Emitter, node: Node) -> str:
    x, shape = _first(node), _ints(node, "normalized_shape")
    weight = e.of(node, "weight") or e.tensor(np.ones(shape, dtype=_numpy(x.type.dtype)))
    return e.emit("RMSNormalization", [e.name(x), weight], axis=-len(shape), epsilon=_float(node, "eps", 1e-5))


def _numpy(dtype: str) -> Any:
    found = {"fp32": np.float32, "fp64": np.float64, "fp16": np.float16}.get(dtype)
    if found is None:
        raise UserError(f"constants of {dtype} cannot be written as ONNX")
    return found


def _batch_norm(e: Emitter, node: Node) -> str:
    x = _first(node)
    if node.attribute("training", node.attribute("train", False)):
        raise UserError("a batch norm by the statistics of the batch cannot be written as ONNX")
    channels, kind = x.type.shape[1], _numpy(x.type.dtype)
    weight = e.of(node, "weight") or e.tensor(np.ones(channels, dtype=kind))
    bias = e.of(node, "bias") or e.tensor(np.zeros(channels, dtype=kind))
    eps = _float(node, "eps", _float(node, "epsilon", 1e-5))
    inputs = [e.name(x), weight, bias, e.of(node, "running_mean"), e.of(node, "running_var")]
    return e.emit("BatchNormalization", inputs, epsilon=eps)


def _group_norm(e: Emitter, node: Node) -> str:
    x = _first(node)
    channels, kind = x.type.shape[1], _numpy(x.type.dtype)
    weight = e.of(node, "weight") or e.tensor(np.ones(channels, dtype=kind))
    bias = e.of(node, "bias") or e.tensor(np.zeros(channels, dtype=kind))
    groups = _int(node, "group", _int(node, "num_groups", 1))
    return e.emit("GroupNormalization", [e.name(x), weight, bias], epsilon=_float(node, "eps", 1e-5), num_groups=groups)


def _spread(node: Node, name: str, rank: int, default: int) -> list[int]:
    found = _ints(node, name) or [default]
    return found * rank if len(found) == 1 else found


def _padded(x: Value) -> tuple[Value, list[int], list[int]]:
    """What a convolution may read in place of a tensor with zeros around it, and the zeros before and after."""
    rank, node = x.type.rank - 2, x.node
    pads = _ints(node, "pad") if node.op == "constant_pad_nd" and not _float(node, "value", 0.0) else []
    if not pads or any(pads[2 * rank :]) or min(pads) < 0:
        return x, [0] * rank, [0] * rank
    filled = [*pads, *[0] * (2 * rank)][: 2 * rank]  # the last dim comes first
    return node.inputs[0], filled[-2::-2], filled[-1::-2]


def _convolution(e: Emitter, node: Node) -> str:
    weight = node.input("weight")
    assert weight is not None
    x, rank = _first(node), _first(node).type.rank - 2
    x, before, after = _padded(x) if not node.attribute("transposed") else (x, [0] * rank, [0] * rank)
    pads = _spread(node, "padding", rank, 0)
    attributes: dict[str, Any] = {
        "strides": _spread(node, "stride", rank, 1),
        "pads": [a + b for a, b in zip(pads + pads, before + after, strict=True)],
        "group": _int(node, "groups", 1),
        "dilations": _spread(node, "dilation", rank, 1),
        "kernel_shape": list(weight.type.shape[2:]),
    }
    inputs = [e.name(x), e.name(weight), *([e.of(node, "bias")] if node.input("bias") else [])]
    if not node.attribute("transposed"):
        return e.emit("Conv", inputs, **attributes)
    return e.emit("ConvTranspose", inputs, output_padding=_spread(node, "output_padding", rank, 0), **attributes)


def _pool(e: Emitter, node: Node) -> str:
    rank = _first(node).type.rank - 2
    kernel = _spread(node, "kernel_size", rank, 1)
    pads = _spread(node, "padding", rank, 0)
    attributes: dict[str, Any] = {
        "kernel_shape": kernel,
        "strides": (_ints(node, "stride") and _spread(node, "stride", rank, 1)) or kernel,
        "pads": pads + pads,
        "ceil_mode": int(bool(node.attribute("ceil_mode", False))) or None,
    }
    if "max" in node.op:
        return e.emit("MaxPool", [e.name(_first(node))], dilations=_spread(node, "dilation", rank, 1), **attributes)
    count = int(node.attribute("count_include_pad", True) is not False)
    return e.emit("AveragePool", [e.name(_first(node))], count_include_pad=count, **attributes)


def _adaptive(e: Emitter, node: Node) -> str:
    size, made = _first(node).type.shape[2:], node.outputs[0].shape[2:]
    if all(n == 1 for n in made):
        return e.emit("GlobalAveragePool", [e.name(_first(node))])
    if any(a % b for a, b in zip(size, made, strict=True)):
        raise UserError(f"an adaptive pool from {size} to {made} cannot be written as ONNX")
    kernel = [a // b for a, b in zip(size, made, strict=True)]
    return e.emit("AveragePool", [e.name(_first(node))], kernel_shape=kernel, strides=kernel)


def _embedding(e: Emitter, node: Node) -> str:
    return e.emit("Gather", [e.of(node, "weight"), e.of(node, "indices")], axis=0)


def _index(e: Emitter, node: Node) -> str:
    tensors = node.inputs_of("indices")
    places = _ints(node, "indices.at", range(len(tensors)))
    if len(tensors) == 1 and tensors[0].type.dtype != "bool":
        return e.emit("Gather", [e.of(node, "self"), e.name(tensors[0])], axis=places[0])
    raise UserError("an index by several tensors or by a mask cannot be written as ONNX")


def _gather(e: Emitter, node: Node) -> str:
    return e.emit("GatherElements", [e.of(node, "self"), e.of(node, "index")], axis=_int(node, "dim", 0))


def _attention(e: Emitter, node: Node) -> str:
    names = [e.of(node, name) for name in ("query", "key", "value")]
    mask = node.input("attn_mask") or node.input("attn_bias")
    if mask is not None:
        names.append(e.name(mask))
    if _float(node, "dropout_p", 0.0):
        raise UserError("attention with dropout cannot be written as ONNX")
    scale = node.attribute("scale")
    return e.emit(
        "Attention",
        names,
        is_causal=int(bool(node.attribute("is_causal", False))) or None,
        scale=None if scale is None else float(str(scale)),
    )


def _gelu(e: Emitter, node: Node) -> str:
    kind = node.attribute("approximate")
    return e.emit("Gelu", [e.name(_first(node))], approximate="tanh" if kind == "tanh" else None)


def _silu(e: Emitter, node: Node) -> str:
    x = e.name(_first(node))
    return e.emit("Mul", [x, e.emit("Sigmoid", [x])])


def _rsqrt(e: Emitter, node: Node) -> str:
    return e.emit("Reciprocal", [e.emit("Sqrt", [e.name(_first(node))])])


def _same(e: Emitter, node: Node) -> str:
    return e.name(_first(node))


def _hardsigmoid(e: Emitter, node: Node) -> str:
    return e.emit("HardSigmoid", [e.name(_first(node))], alpha=1 / 6, beta=0.5)


def _sized(op: str, attribute: str, default: float) -> Row:
    """An operator with one number, which ONNX calls alpha."""
    return lambda e, node: e.emit(op, [e.name(_first(node))], alpha=_float(node, attribute, default))


def _pad(e: Emitter, node: Node) -> str:
    pads = _ints(node, "pad")
    rank = _first(node).type.rank
    before, after = [0] * rank, [0] * rank
    for n in range(len(pads) // 2):
        before[rank - 1 - n], after[rank - 1 - n] = pads[2 * n : 2 * n + 2]
    value = e.scalar(_float(node, "value", 0.0), node.outputs[0].dtype)
    return e.emit("Pad", [e.name(_first(node)), e.numbers(before + after), value], mode="constant")


def _triangle(e: Emitter, node: Node) -> str:
    k = e.tensor(np.array(_int(node, "diagonal", 0), dtype=np.int64))
    return e.emit("Trilu", [e.name(_first(node)), k], upper=int(node.op == "triu"))


def _fill(e: Emitter, node: Node) -> str:
    from onnx import helper

    type = node.outputs[0]
    number = {"zeros": 0.0, "ones": 1.0}.get(node.op, _float(node, "fill_value", 0.0))
    value = helper.make_tensor("value", CODES[type.dtype], [1], [number])
    return e.emit("ConstantOfShape", [e.numbers(type.shape)], value=value)


def _roll(e: Emitter, node: Node) -> str:
    x, name = _first(node), e.name(_first(node))
    for dim, shift in zip(_ints(node, "dims"), _ints(node, "shifts"), strict=True):
        size = x.type.shape[dim]
        at = e.numbers([-shift % size])
        parts = [
            e.emit("Slice", [name, *ends, e.numbers([dim])]) for ends in ((at, e.numbers([size])), (e.numbers([0]), at))
        ]
        name = e.emit("Concat", parts, axis=wrap(dim, x.type.rank))
    return name


_UNARY: Final = """
relu Relu neg Neg exp Exp log Log sqrt Sqrt abs Abs tanh Tanh sigmoid Sigmoid erf Erf sin Sin cos Cos reciprocal
Reciprocal floor Floor ceil Ceil round Round softplus Softplus sign Sign logical_not Not bitwise_not Not mish Mish
hardswish HardSwish
"""
_BINARY: Final = """
add Add sub Sub rsub Sub mul Mul maximum Max minimum Min eq Equal gt Greater ge GreaterOrEqual lt Less le
LessOrEqual logical_and And logical_or Or bitwise_and And
"""
"""Pairs of our operator and ONNX's."""

_SHARED: Final[Mapping[str, Row]] = {
    "view _unsafe_view squeeze": _reshape,
    "t transpose permute": _order,
    "split split_with_sizes unbind": _split,
    "clone detach alias lift_fresh": _same,
    "_softmax _log_softmax": _softmax,
    "native_batch_norm cudnn_batch_norm": _batch_norm,
    "_native_batch_norm_legit_no_training _batch_norm_no_update": _batch_norm,
    "max_pool2d_with_indices max_pool2d avg_pool2d avg_pool1d": _pool,
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention": _attention,
    "tril triu": _triangle,
    "zeros ones full": _fill,
    "div floor_divide": _division,
    "clamp hardtanh": _clip,
    "mm bmm": _product,
}
"""Operators that are written alike -> how."""


def _pairs(text: str) -> list[tuple[str, str]]:
    words = text.split()
    return list(zip(words[::2], words[1::2], strict=True))


ROWS: Final[Mapping[str, Row]] = {
    **{name: _unary(op) for name, op in _pairs(_UNARY)},
    **{name: _binary(op) for name, op in _pairs(_BINARY)},
    **{name: row for names, row in _SHARED.items() for name in names.split()},
    **{
        name: _reduce(op)
        for name, op in _pairs("sum ReduceSum mean ReduceMean amax ReduceMax amin ReduceMin prod ReduceProd")
    },
    **{name: _arg(op) for name, op in _pairs("argmax ArgMax argmin ArgMin")},
    "leaky_relu": _sized("LeakyRelu", "negative_slope", 0.01),
    "elu": _sized("Elu", "alpha", 1.0),
    "pow": _power,
    "where": _where,
    "masked_fill": _masked_fill,
    "_to_copy": _cast,
    "addmm": _gemm,
    "baddbmm": _batched,
    "hardsigmoid": _hardsigmoid,
    "rsqrt": _rsqrt,
    "silu": _silu,
    "gelu": _gelu,
    "expand": _expand,
    "unsqueeze": _unsqueeze,
    "slice": _slice,
    "select": _select,
    "cat": _cat,
    "stack": _stack,
    "var": _variance,
    "ne": _unequal,
    "repeat": _repeat,
    "index_select": _index_select,
    "native_layer_norm": _layer_norm,
    "_fused_rms_norm": _rms_norm,
    "native_group_norm": _group_norm,
    "convolution": _convolution,
    "_adaptive_avg_pool2d": _adaptive,
    "embedding": _embedding,
    "index": _index,
    "gather": _gather,
    "constant_pad_nd": _pad,
    "roll": _roll,
}
"""Operator -> how it is written; the result is the name of its output, or of each."""


def opaque(e: Emitter, node: Node) -> list[str]:
    """An operator of an ONNX file that was kept as it is."""
    space, _, op = node.op.partition("::")
    kept: dict[str, Attribute] = {name: value for name, value in node.attributes if name != "again"}
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in kept.items()}
    inputs = [""] * (1 + max((int(n.removeprefix("input")) for n in node.names), default=-1))
    for name, value in zip(node.names, node.inputs, strict=True):
        inputs[int(name.removeprefix("input"))] = e.name(value)
    domain = space.partition(".")[2]
    name = e.emit(op, inputs, outputs=len(node.outputs), domain=domain, **given)
    return [name, *(f"{name}.{index}" for index in range(1, len(node.outputs)))]
