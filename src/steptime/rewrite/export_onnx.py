"""Graphs as ONNX models: one row per operator; what has no row is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from steptime import __version__
from steptime.captured.aten.views import wrap
from steptime.captured.graph import Attribute, Node, TensorType, Value
from steptime.captured.graph.program import SOURCES
from steptime.captured.onnx.load import require_onnx
from steptime.errors import UserError, shorten
from steptime.rewrite.flow import FUSED, Flow
from steptime.rewrite.fused import opened, results_of

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

OPSET: Final = 23
"""Operator set that is written: it has Attention and RMSNormalization."""
IR_VERSION: Final = 10
CODES: Final[Mapping[str, int]] = {
    "fp32": 1,
    "uint8": 2,
    "int8": 3,
    "uint16": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "fp16": 10,
    "fp64": 11,
    "uint32": 12,
    "uint64": 13,
    "bf16": 16,
}
"""Element type -> number in ONNX."""
LARGEST_BYTES: Final = 2**31 - 2**20
"""The most that one protobuf message can have, with room for its nodes."""


class Emitter:
    """Nodes of an ONNX graph in the making."""

    def __init__(self, flow: Flow) -> None:
        require_onnx()
        self.flow = flow
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, TensorProto] = {}
        self.domains: set[str] = set()
        self._names: dict[Value, str] = {}
        self._count = 0
        self._taken = {str(node.attribute("name")) for node in flow.order if node.op in SOURCES} | set(flow.names)

    def name(self, value: Value) -> str:
        """Name of a value that was made."""
        return self._names[value]

    def put(self, value: Value, name: str) -> None:
        """Say what a value is called."""
        self._names[value] = name

    def fresh(self, op: str) -> str:
        """A new name."""
        while True:
            self._count += 1
            name = f"{op.lower()}_{self._count}"
            if name not in self._taken:
                return name

    def emit(self, op: str, inputs: Sequence[str], *, outputs: int = 1, domain: str = "", **attributes: Any) -> str:
        """One node; the name of its first output, of which those of the others follow as ``name.1``, ``name.2``."""
        from onnx import helper

        name = self.fresh(op)
        names = [name, *(f"{name}.{index}" for index in range(1, outputs))]
        given = {key: value for key, value in attributes.items() if value is not None}
        self.nodes.append(helper.make_node(op, list(inputs), names, name=name, domain=domain, **given))
        if domain:
            self.domains.add(domain)
        return name

    def numbers(self, values: Iterable[int]) -> str:
        """A list of integers, as shapes and axes are given."""
        return self.tensor(np.array(list(values), dtype=np.int64))

    def scalar(self, value: float, dtype: str) -> str:
        """One number of an element type."""
        from onnx import helper

        kind = CODES[dtype]
        key = f"number.{dtype}.{value!r}"
        if key not in self.constants:
            self.constants[key] = helper.make_tensor(key, kind, (), [value])
        return key

    def tensor(self, array: Any) -> str:
        """A constant tensor; equal ones are one."""
        from onnx import numpy_helper

        key = f"constant.{array.dtype}.{'x'.join(map(str, array.shape))}.{abs(hash(array.tobytes())):x}"
        if key not in self.constants:
            self.constants[key] = numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), key)
        return key

    def of(self, node: Node, name: str) -> str:
        """Name of an input of a node, the empty text where it is not given."""
        found = node.input(name)
        return "" if found is None else self.name(found)

    def operand(self, node: Node, name: str, dtype: str) -> str:
        """An argument that is a tensor or a number."""
        found = node.input(name)
        if found is not None:
            return self.cast(self.name(found), found.type.dtype, dtype)
        given = node.attribute(name)
        if not isinstance(given, (int, float)):
            raise UserError(f"{node.op} without {name!r} cannot be written as ONNX")
        return self.scalar(given, dtype)

    def cast(self, name: str, have: str, want: str) -> str:
        """A tensor in another element type."""
        return name if have == want else self.emit("Cast", [name], to=CODES[want])


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
    a, b = node.inputs[-2:]
    return e.emit("MatMul", [e.name(a), e.name(b)])


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


def _convolution(e: Emitter, node: Node) -> str:
    weight = node.input("weight")
    assert weight is not None
    rank = _first(node).type.rank - 2
    pads = _spread(node, "padding", rank, 0)
    attributes: dict[str, Any] = {
        "strides": _spread(node, "stride", rank, 1),
        "pads": pads + pads,
        "group": _int(node, "groups", 1),
        "dilations": _spread(node, "dilation", rank, 1),
        "kernel_shape": list(weight.type.shape[2:]),
    }
    inputs = [e.name(_first(node)), e.name(weight), *([e.of(node, "bias")] if node.input("bias") else [])]
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


def _hardswish(e: Emitter, node: Node) -> str:
    return e.emit("HardSwish", [e.name(_first(node))])


def _hardsigmoid(e: Emitter, node: Node) -> str:
    return e.emit("HardSigmoid", [e.name(_first(node))], alpha=1 / 6, beta=0.5)


def _sized(op: str, attribute: str, onnx: str, default: float) -> Row:
    return lambda e, node: e.emit(op, [e.name(_first(node))], **{onnx: _float(node, attribute, default)})


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


ROWS: Final[Mapping[str, Row]] = {
    "add": _binary("Add"),
    "sub": _binary("Sub"),
    "rsub": _binary("Sub"),
    "mul": _binary("Mul"),
    "div": _division,
    "floor_divide": _division,
    "pow": _power,
    "maximum": _binary("Max"),
    "minimum": _binary("Min"),
    "eq": _binary("Equal"),
    "gt": _binary("Greater"),
    "ge": _binary("GreaterOrEqual"),
    "lt": _binary("Less"),
    "le": _binary("LessOrEqual"),
    "logical_and": _binary("And"),
    "logical_or": _binary("Or"),
    "bitwise_and": _binary("And"),
    "where": _where,
    "masked_fill": _masked_fill,
    "clamp": _clip,
    "hardtanh": _clip,
    "_to_copy": _cast,
    "mm": _product,
    "bmm": _product,
    "addmm": _gemm,
    "baddbmm": _batched,
    "relu": _unary("Relu"),
    "neg": _unary("Neg"),
    "exp": _unary("Exp"),
    "log": _unary("Log"),
    "sqrt": _unary("Sqrt"),
    "abs": _unary("Abs"),
    "tanh": _unary("Tanh"),
    "sigmoid": _unary("Sigmoid"),
    "erf": _unary("Erf"),
    "sin": _unary("Sin"),
    "cos": _unary("Cos"),
    "reciprocal": _unary("Reciprocal"),
    "floor": _unary("Floor"),
    "ceil": _unary("Ceil"),
    "round": _unary("Round"),
    "softplus": _unary("Softplus"),
    "sign": _unary("Sign"),
    "logical_not": _unary("Not"),
    "bitwise_not": _unary("Not"),
    "mish": _unary("Mish"),
    "hardswish": _hardswish,
    "hardsigmoid": _hardsigmoid,
    "leaky_relu": _sized("LeakyRelu", "negative_slope", "alpha", 0.01),
    "elu": _sized("Elu", "alpha", "alpha", 1.0),
    "rsqrt": _rsqrt,
    "silu": _silu,
    "gelu": _gelu,
    "view": _reshape,
    "_unsafe_view": _reshape,
    "t": _order,
    "transpose": _order,
    "permute": _order,
    "expand": _expand,
    "unsqueeze": _unsqueeze,
    "squeeze": _reshape,
    "slice": _slice,
    "select": _select,
    "split": _split,
    "split_with_sizes": _split,
    "unbind": _split,
    "cat": _cat,
    "clone": _same,
    "detach": _same,
    "alias": _same,
    "lift_fresh": _same,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "sum": _reduce("ReduceSum"),
    "mean": _reduce("ReduceMean"),
    "amax": _reduce("ReduceMax"),
    "amin": _reduce("ReduceMin"),
    "prod": _reduce("ReduceProd"),
    "argmax": _arg("ArgMax"),
    "argmin": _arg("ArgMin"),
    "native_layer_norm": _layer_norm,
    "_fused_rms_norm": _rms_norm,
    "native_group_norm": _group_norm,
    **dict.fromkeys(
        ("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit_no_training", "_batch_norm_no_update"),
        _batch_norm,
    ),
    "convolution": _convolution,
    "max_pool2d_with_indices": _pool,
    "max_pool2d": _pool,
    "avg_pool2d": _pool,
    "avg_pool1d": _pool,
    "_adaptive_avg_pool2d": _adaptive,
    "embedding": _embedding,
    "index": _index,
    "gather": _gather,
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
        ),
        _attention,
    ),
    "constant_pad_nd": _pad,
    "tril": _triangle,
    "triu": _triangle,
    "zeros": _fill,
    "ones": _fill,
    "full": _fill,
    "roll": _roll,
}
"""Operator -> how it is written; the result is the name of its output, or of each."""


def _opaque(e: Emitter, node: Node) -> list[str]:
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


def onnx_model(flow: Flow, contents: Mapping[str, Any]) -> ModelProto:
    """The graph as an ONNX model with its weights.

    Args:
        flow: a graph of a forward pass.
        contents: weights by name; constants are computed from them.

    Raises:
        UserError: an operator has no row, the graph trains, or the weights are over 2 GiB.
    """
    from onnx import helper

    if flow.training:
        raise UserError("a training step cannot be written as ONNX", hint="write it as a .py file")
    e = Emitter(flow)
    for number, value in enumerate(flow.inputs):
        e.put(value, str(value.node.attribute("name")) or f"input.{number}")
    for node in flow.order:
        _emit(e, node, contents)
    outputs = []
    for name, value in zip(_unique(flow.names, flow.inputs), flow.outputs, strict=True):
        e.nodes.append(helper.make_node("Identity", [e.name(value)], [name], name=f"output.{name}"))
        outputs.append(_declared(name, value.type))
    read = {name for node in e.nodes for name in node.input}
    stored = [tensor for name, tensor in e.constants.items() if name in read]
    size = sum(len(tensor.raw_data) for tensor in stored)
    if size > LARGEST_BYTES:
        raise UserError(f"the weights have {size} bytes, more than one ONNX file can hold", hint="write a .py file")
    inputs = [_declared(e.name(value), value.type) for value in flow.inputs]
    graph = helper.make_graph(e.nodes, shorten(flow.name) or "graph", inputs, outputs, stored)
    sets = [helper.make_opsetid("", OPSET), *(helper.make_opsetid(domain, 1) for domain in sorted(e.domains))]
    return helper.make_model(
        graph, opset_imports=sets, ir_version=IR_VERSION, producer_name="steptime", producer_version=__version__
    )


def _unique(names: Sequence[str], inputs: Sequence[Value]) -> list[str]:
    taken = {str(value.node.attribute("name")) for value in inputs}
    return [f"{name}.result" if name in taken else name for name in names]


def _declared(name: str, type: TensorType) -> Any:
    from onnx import helper

    return helper.make_tensor_value_info(name, CODES[type.dtype], list(type.shape))


def _emit(e: Emitter, node: Node, contents: Mapping[str, Any]) -> None:
    if node.op in SOURCES:
        if node.value() not in e.flow.inputs:
            e.put(node.value(), _stored(e, node, contents))
        return
    if node.op == FUSED:
        steps = opened(e.flow.nodes, node)
        for step in steps:
            _emit(e, step, contents)
        for index, at in enumerate(results_of(node)):
            e.put(node.value(index), e.name(steps[at].value()))
        return
    row = ROWS.get(node.op)
    if row is None and node.op.startswith("onnx"):
        row = _opaque
    if row is None:
        if node in e.flow.constant:
            from steptime.rewrite.kernels import evaluate

            for index in range(len(node.outputs)):
                e.put(node.value(index), e.tensor(evaluate(e.flow, [node.value(index)], contents)[0].numpy()))
            return
        raise UserError(f"the operator {shorten(node.op)!r} cannot be written as ONNX", hint="write a .py file")
    made = row(e, node)
    for index, name in enumerate([made] if isinstance(made, str) else made):
        if name:
            e.put(node.value(index), name)


def _stored(e: Emitter, node: Node, contents: Mapping[str, Any]) -> str:
    import torch
    from onnx import helper, numpy_helper

    from steptime.rewrite.kernels import evaluate

    name = str(node.attribute("name"))
    if name in e.constants:
        return name
    tensor = evaluate(e.flow, [node.value()], contents)[0].contiguous()
    if str(tensor.dtype) == "torch.bfloat16":
        raw = tensor.view(torch.int16).numpy().tobytes()
        e.constants[name] = helper.make_tensor(name, CODES["bf16"], list(tensor.shape), raw, raw=True)
    else:
        e.constants[name] = numpy_helper.from_array(tensor.numpy(), name)
    return name
