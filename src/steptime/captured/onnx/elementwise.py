"""Rows of element-wise operators, reductions, sorts and scans."""

from __future__ import annotations

from typing import Any

import numpy as np

from steptime.captured.aten import layers, maths, views
from steptime.captured.aten.views import like, tensor_type
from steptime.captured.graph.program import Attribute, Value
from steptime.captured.onnx.call import OnnxCall, Result, chain, row
from steptime.captured.onnx.tensor import dtype_of
from steptime.model.spec import FLOATS

#: Operators of one tensor that ATen has under another or the same name and without arguments.
MAPS = {
    "Relu": "relu", "Tanh": "tanh", "Sigmoid": "sigmoid", "Erf": "erf", "Exp": "exp", "Log": "log", "Sqrt": "sqrt",
    "Neg": "neg", "Abs": "abs", "Reciprocal": "reciprocal", "Floor": "floor", "Ceil": "ceil", "Round": "round",
    "Sin": "sin", "Cos": "cos", "Tan": "tan", "Asin": "asin", "Acos": "acos", "Atan": "atan", "Sinh": "sinh",
    "Cosh": "cosh", "Asinh": "asinh", "Acosh": "acosh", "Atanh": "atanh", "Sign": "sign", "Not": "logical_not",
    "IsNaN": "isnan", "BitwiseNot": "bitwise_not", "Softplus": "softplus", "Mish": "mish", "HardSwish": "hardswish",
}  # fmt: skip

#: Operators of two tensors; the second column is the operator with its arguments exchanged, for a number on the left.
PAIRS = {
    "Add": ("add", "add"), "Sub": ("sub", "rsub"), "Mul": ("mul", "mul"), "Equal": ("eq", "eq"),
    "Greater": ("gt", "lt"), "GreaterOrEqual": ("ge", "le"), "Less": ("lt", "gt"), "LessOrEqual": ("le", "ge"),
    "And": ("logical_and", None), "Or": ("logical_or", None), "Xor": ("logical_xor", None),
    "BitwiseAnd": ("bitwise_and", "bitwise_and"), "BitwiseOr": ("bitwise_or", "bitwise_or"),
    "BitwiseXor": ("bitwise_xor", "bitwise_xor"),
}  # fmt: skip


@row(*MAPS)
def _map(call: OnnxCall) -> Result:
    return maths.unary(call.nodes, MAPS[call.op], call.value())


def operands(call: OnnxCall) -> tuple[Value | None, Value | None, maths.Operand, maths.Operand]:
    """Two inputs, each as a value or None where it is a number, and each as it is."""
    a, b = call.operand(0, 1), call.operand(1, 0)
    if not isinstance(a, Value) and not isinstance(b, Value):
        a = call.value(0)
    return (a if isinstance(a, Value) else None), (b if isinstance(b, Value) else None), a, b


@row(*PAIRS)
def _pair(call: OnnxCall) -> Result:
    op, swapped = PAIRS[call.op]
    left, right, a, b = operands(call)
    if swapped is None:
        return maths.binary(call.nodes, op, call.value(0), call.value(1))
    if left is None:
        assert right is not None
        return maths.binary(call.nodes, swapped, right, a)
    return maths.binary(call.nodes, op, left, b)


@row("Div")
def _div(call: OnnxCall) -> Result:
    left, right, a, b = operands(call)
    whole: dict[str, Attribute] = {} if call.type().dtype in FLOATS else {"rounding_mode": "trunc"}
    if left is None:
        assert right is not None
        if whole:
            return maths.binary(call.nodes, "div", call.value(0), right, **whole)
        inverse = maths.unary(call.nodes, "reciprocal", right)
        return inverse if a == 1 else maths.mul(call.nodes, inverse, a)
    return maths.binary(call.nodes, "div", left, b, **whole)


@row("Pow")
def _pow(call: OnnxCall) -> Result:
    left, right, a, b = operands(call)
    if left is None:
        assert right is not None
        return maths.pointwise(call.nodes, "pow", {"exponent": right}, {"self": _plain(a)})
    return maths.to(call.nodes, maths.power(call.nodes, left, b), call.type().dtype)


def _plain(number: maths.Operand) -> Attribute:
    assert not isinstance(number, Value)
    return number


@row("Mod")
def _mod(call: OnnxCall) -> Result:
    op = "fmod" if call.get("fmod") else "remainder"
    return maths.binary(call.nodes, op, call.value(0), call.operand(1, 0))


@row("BitShift")
def _shift(call: OnnxCall) -> Result:
    op = "__lshift__" if call.get("direction") == "LEFT" else "__rshift__"
    return maths.binary(call.nodes, op, call.value(0), call.operand(1, 0))


@row("Max", "Min", "Sum", "Mean")
def _many(call: OnnxCall) -> Result:
    op = {"Max": "maximum", "Min": "minimum"}.get(call.op, "add")
    total = chain(call.nodes, op, call.values())
    if call.op == "Mean" and len(call.inputs) > 1:
        total = maths.div(call.nodes, total, len(call.inputs))
    return total


@row("Where")
def _where(call: OnnxCall) -> Result:
    return maths.where(call.nodes, call.value(0), call.value(1), call.value(2))


@row("Clip")
def _clip(call: OnnxCall) -> Result:
    bounds: dict[str, maths.Operand] = {}
    for index, name in ((1, "min"), (2, "max")):
        if call.get(name) is not None:
            bounds[name] = float(call.get(name))
        elif call.has(index):
            bounds[name] = call.operand(index)
    numbers = {name: _plain(bound) for name, bound in bounds.items() if not isinstance(bound, Value)}
    if len(numbers) == len(bounds):
        return maths.pointwise(call.nodes, "clamp", {"self": call.value()}, dict(numbers)) if bounds else call.value()
    result = call.value()
    for name, bound in bounds.items():
        other = bound if isinstance(bound, Value) else maths.full(call.nodes, (), float(bound), result.type.dtype)
        result = maths.binary(call.nodes, "maximum" if name == "min" else "minimum", result, other)
    return result


@row("Cast")
def _cast(call: OnnxCall) -> Result:
    return _cast_to(call, dtype_of(int(call.get("to", 0))))


def _cast_to(call: OnnxCall, dtype: str) -> Result:
    array = call.tensor(0).array
    if array is not None and dtype not in ("bf16", "fp8", "fp8_e5m2"):
        return array.astype(_NUMPY.get(dtype, dtype))
    return maths.to(call.nodes, call.value(), dtype)


_NUMPY = {"fp32": np.float32, "fp64": np.float64, "fp16": np.float16, "bool": np.bool_}


@row("CastLike")
def _cast_like(call: OnnxCall) -> Result:
    return _cast_to(call, call.type(1).dtype)


@row("Identity")
def _identity(call: OnnxCall) -> Result:
    return call.tensor(0)


@row("Dropout")
def _dropout(call: OnnxCall) -> Result:
    training = call.maybe_known(2)
    if training is not None and bool(training.reshape(-1)[0]):
        ratio = call.maybe_known(1)
        share = 0.5 if ratio is None else float(ratio.reshape(-1)[0])
        x = call.value()
        outputs = [x.type, type(x.type)(x.type.shape, "bool")]
        attributes: dict[str, Attribute] = {"p": share, "train": True, "draw": len(call.nodes)}
        made = call.nodes.apply("native_dropout", {"input": x}, attributes, outputs=outputs)
        return made.value(0), made.value(1)
    mask = [maths.full(call.nodes, call.type().shape, True, "bool")] if len(call.outputs) > 1 else []
    return (call.value(), *mask)


@row("Gelu")
def _gelu(call: OnnxCall) -> Result:
    return maths.unary(call.nodes, "gelu", call.value(), approximate=call.get("approximate", "none"))


@row("Gelu", domain="com.microsoft")
def _ms_gelu(call: OnnxCall) -> Result:
    return maths.unary(call.nodes, "gelu", call.value(), approximate="none")


@row("FastGelu", "BiasGelu", domain="com.microsoft")
def _fast_gelu(call: OnnxCall) -> Result:
    x = maths.add(call.nodes, call.value(), call.weight(1)) if call.has(1) else call.value()
    return maths.unary(call.nodes, "gelu", x, approximate="tanh" if call.op == "FastGelu" else "none")


@row("QuickGelu", domain="com.microsoft")
@row("Swish")
def _swish(call: OnnxCall) -> Result:
    alpha = float(call.get("alpha", 1.702 if call.op == "QuickGelu" else 1.0))
    x = call.value()
    if alpha == 1:
        return maths.unary(call.nodes, "silu", x)
    return maths.mul(call.nodes, x, maths.unary(call.nodes, "sigmoid", maths.mul(call.nodes, x, alpha)))


@row("Elu", "Selu", "Celu", "LeakyRelu", "ThresholdedRelu")
def _activation(call: OnnxCall) -> Result:
    alpha = call.get("alpha")
    arguments: dict[str, dict[str, Any]] = {
        "Elu": {"op": "elu", "alpha": 1.0 if alpha is None else alpha},
        "Selu": {
            "op": "elu",
            "alpha": 1.67326319217681884765625 if alpha is None else alpha,
            "scale": call.get("gamma", 1.05070102214813232421875),
        },
        "Celu": {"op": "elu", "alpha": alpha or 1.0, "scale": 1.0, "input_scale": 1.0 / (alpha or 1.0)},
        "LeakyRelu": {"op": "leaky_relu", "negative_slope": 0.01 if alpha is None else alpha},
        "ThresholdedRelu": {"op": "threshold", "threshold": 1.0 if alpha is None else alpha, "value": 0.0},
    }
    given = dict(arguments[call.op])
    return maths.unary(call.nodes, given.pop("op"), call.value(), **given)


@row("HardSigmoid")
def _hard_sigmoid(call: OnnxCall) -> Result:
    scaled = maths.mul(call.nodes, call.value(), float(call.get("alpha", 0.2)))
    shifted = maths.add(call.nodes, scaled, float(call.get("beta", 0.5)))
    return maths.unary(call.nodes, "clamp", shifted, min=0.0, max=1.0)


@row("Softsign")
def _softsign(call: OnnxCall) -> Result:
    below = maths.add(call.nodes, maths.unary(call.nodes, "abs", call.value()), 1.0)
    return maths.div(call.nodes, call.value(), below)


@row("PRelu")
def _prelu(call: OnnxCall) -> Result:
    return maths.pointwise(call.nodes, "_prelu_kernel", {"self": call.value(), "weight": call.weight(1)})


@row("IsInf")
def _is_inf(call: OnnxCall) -> Result:
    positive, negative = bool(call.get("detect_positive", 1)), bool(call.get("detect_negative", 1))
    if positive and negative:
        return maths.unary(call.nodes, "isinf", call.value())
    if not positive and not negative:
        return maths.full(call.nodes, call.type().shape, False, "bool")
    return maths.binary(call.nodes, "eq", call.value(), float("inf") if positive else float("-inf"))


_PLAIN = {"ReduceSum": "sum", "ReduceMean": "mean", "ReduceMax": "amax", "ReduceMin": "amin"}


@row("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSum",
     "ReduceLogSumExp", "ReduceProd")  # fmt: skip
def _reduce(call: OnnxCall) -> Result:
    nodes, x = call.nodes, call.value()
    axes, keep = call.axes(), bool(call.get("keepdims", 1))
    if not axes:
        if call.get("noop_with_empty_axes"):
            return _transformed(call, x)
        axes = tuple(range(x.type.rank))
    if call.op in _PLAIN:
        dtype = x.type.dtype
        return maths.to(nodes, maths.reduce(nodes, _PLAIN[call.op], x, axes, keep), dtype)
    if call.op == "ReduceProd":
        for axis in sorted(axes, reverse=True):
            shape = maths.reduced_shape(x.type.shape, (axis,), keep)
            attributes: dict[str, Attribute] = {"dim": axis, "keepdim": keep}
            x = nodes.apply("prod", {"self": x}, attributes, outputs=[tensor_type(shape, x.type.dtype)]).value()
        return x
    if call.op == "ReduceLogSumExp":
        return maths.reduce(nodes, "logsumexp", x, axes, keep)
    if call.op in ("ReduceL1", "ReduceL2"):
        more: dict[str, Attribute] = {"ord": int(call.op[-1])}
        shape = maths.reduced_shape(x.type.shape, axes, keep)
        attributes = {**more, "dim": axes, "keepdim": keep}
        output = tensor_type(shape, x.type.dtype)
        return nodes.apply("linalg_vector_norm", {"self": x}, attributes, outputs=[output]).value()
    if call.op == "ReduceSumSquare":
        x = maths.mul(nodes, x, x)
    total = maths.to(nodes, maths.reduce(nodes, "sum", x, axes, keep), x.type.dtype)
    return maths.unary(nodes, "log", total) if call.op == "ReduceLogSum" else total


def _transformed(call: OnnxCall, x: Value) -> Result:
    """What is left of a reduction over no dims."""
    if call.op == "ReduceSumSquare":
        return maths.mul(call.nodes, x, x)
    if call.op in ("ReduceL1", "ReduceL2"):
        return maths.unary(call.nodes, "abs", x)
    return maths.unary(call.nodes, "log", x) if call.op == "ReduceLogSum" else x


@row("ArgMax", "ArgMin")
def _arg(call: OnnxCall) -> Result:
    if call.get("select_last_index"):
        return None
    return layers.argmax(call.nodes, call.op.lower(), call.value(), call.axis(0), bool(call.get("keepdims", 1)))


@row("CumSum")
def _cumsum(call: OnnxCall) -> Result:
    if call.get("exclusive"):
        return None
    dim, x = views.wrap(int(call.known(1).reshape(-1)[0]), call.type().rank), call.value()
    x = _flip(call, x, dim) if call.get("reverse") else x
    total = call.nodes.apply("cumsum", {"self": x}, {"dim": dim, "dtype": x.type.dtype}, outputs=[like(x.type)]).value()
    return _flip(call, total, dim) if call.get("reverse") else total


def _flip(call: OnnxCall, x: Value, dim: int) -> Value:
    return call.nodes.apply("flip", {"self": x}, {"dims": (dim,)}, outputs=[like(x.type)]).value()


@row("TopK")
def _topk(call: OnnxCall) -> Result:
    dim, x = call.axis(-1), call.value()
    count = int(call.known(1).reshape(-1)[0]) if call.has(1) else int(call.get("k", 1))
    shape = list(x.type.shape)
    shape[dim] = count
    attributes: dict[str, Attribute] = {
        "k": count, "dim": dim, "largest": bool(call.get("largest", 1)), "sorted": bool(call.get("sorted", 1)),
    }  # fmt: skip
    outputs = [tensor_type(shape, x.type.dtype), tensor_type(shape, "int64")]
    made = call.nodes.apply("topk", {"self": x}, attributes, outputs=outputs)
    return made.value(0), made.value(1)


@row("Softmax", "LogSoftmax", "Hardmax")
def _softmax(call: OnnxCall) -> Result:
    if call.op == "Hardmax":
        return None
    nodes, x, log = call.nodes, call.value(), call.op == "LogSoftmax"
    if call.version >= 13:
        return layers.softmax(nodes, x, call.axis(-1), log)
    axis = call.axis(1)
    if axis == x.type.rank - 1:
        return layers.softmax(nodes, x, axis, log)
    return views.reshape(nodes, layers.softmax(nodes, views.flatten(nodes, x, axis), 1, log), x.type.shape)
