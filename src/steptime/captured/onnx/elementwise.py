"""Rows of element-wise operators, reductions, sorts and scans."""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

import torch
from torch.nn import functional as F

from steptime.captured.graph.strides import wrap
from steptime.captured.onnx.call import OnnxCall, Result, row
from steptime.captured.onnx.tensor import dtype_of
from steptime.captured.record.values import TORCH_DTYPES

aten = torch.ops.aten

#: Operators of one tensor without arguments.
MAPS: dict[str, Any] = {
    "Relu": torch.relu, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid, "Erf": torch.erf, "Exp": torch.exp,
    "Log": torch.log, "Sqrt": torch.sqrt, "Neg": torch.neg, "Abs": torch.abs, "Reciprocal": torch.reciprocal,
    "Floor": torch.floor, "Ceil": torch.ceil, "Round": torch.round, "Sin": torch.sin, "Cos": torch.cos,
    "Tan": torch.tan, "Asin": torch.asin, "Acos": torch.acos, "Atan": torch.atan, "Sinh": torch.sinh,
    "Cosh": torch.cosh, "Asinh": torch.asinh, "Acosh": torch.acosh, "Atanh": torch.atanh, "Sign": torch.sign,
    "Not": torch.logical_not, "IsNaN": torch.isnan, "BitwiseNot": torch.bitwise_not, "Softplus": F.softplus,
    "Mish": F.mish, "HardSwish": F.hardswish, "Softsign": F.softsign,
}  # fmt: skip

#: Operators of two tensors, either of which may be a number.
PAIRS: dict[str, Any] = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Equal": operator.eq, "Greater": operator.gt,
    "GreaterOrEqual": operator.ge, "Less": operator.lt, "LessOrEqual": operator.le, "BitwiseAnd": operator.and_,
    "BitwiseOr": operator.or_, "BitwiseXor": operator.xor,
}  # fmt: skip
LOGIC = {"And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor}
MANY = {"Max": torch.maximum, "Min": torch.minimum, "Sum": operator.add, "Mean": operator.add}


@row(*MAPS)
def _map(call: OnnxCall) -> Result:
    return MAPS[call.op](call.x())


def operands(call: OnnxCall) -> tuple[Any, Any]:
    """Two inputs, one of them a number where it is one that is known."""
    a, b = call.operand(0, 1), call.operand(1, 0)
    return (a if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) else call.x()), b


@row(*PAIRS)
def _pair(call: OnnxCall) -> Result:
    return PAIRS[call.op](*operands(call))


@row(*LOGIC)
def _logic(call: OnnxCall) -> Result:
    return LOGIC[call.op](call.x(), call.x(1))


@row("Div")
def _div(call: OnnxCall) -> Result:
    if call.tensor(0).dtype.startswith(("int", "uint")):
        return torch.div(call.x(), call.operand(1, 0), rounding_mode="trunc")
    a, b = operands(call)
    return torch.reciprocal(b) if isinstance(a, float) and a == 1 else a / b


@row("Pow")
def _pow(call: OnnxCall) -> Result:
    a, b = operands(call)
    return (a**b).to(TORCH_DTYPES[call.tensor(0).dtype])


@row("Mod")
def _mod(call: OnnxCall) -> Result:
    return (torch.fmod if call.get("fmod") else torch.remainder)(call.x(), call.operand(1, 0))


@row("BitShift")
def _shift(call: OnnxCall) -> Result:
    shift = operator.lshift if call.get("direction") == "LEFT" else operator.rshift
    return shift(call.x(), call.operand(1, 0))


@row(*MANY)
def _many(call: OnnxCall) -> Result:
    total = reduce(MANY[call.op], call.all())
    return total / len(call.inputs) if call.op == "Mean" and len(call.inputs) > 1 else total


@row("Where")
def _where(call: OnnxCall) -> Result:
    return torch.where(call.x(), call.x(1), call.x(2))


@row("Clip")
def _clip(call: OnnxCall) -> Result:
    x, bounds = call.x(), dict[str, Any]()
    for index, name in ((1, "min"), (2, "max")):
        if call.get(name) is not None or call.has(index):
            bounds[name] = call.operand(index) if call.get(name) is None else float(call.get(name))
    if not any(isinstance(bound, torch.Tensor) for bound in bounds.values()):
        return torch.clamp(x, **bounds) if bounds else x
    for name, bound in bounds.items():
        other = bound if isinstance(bound, torch.Tensor) else torch.full((), bound, dtype=x.dtype)
        x = (torch.maximum if name == "min" else torch.minimum)(x, other)
    return x


@row("Cast", "CastLike")
def _cast(call: OnnxCall) -> Result:
    name = call.tensor(1).dtype if call.op == "CastLike" else dtype_of(int(call.get("to", 0)))
    return call.x().to(TORCH_DTYPES[name])


@row("Identity")
def _identity(call: OnnxCall) -> Result:
    return call.tensor(0)


@row("Dropout")
def _dropout(call: OnnxCall) -> Result:
    x = call.x()
    if call.one(2, False):
        return torch.native_dropout(x, float(call.one(1, 0.5)), True)
    return (x, torch.ones(x.shape, dtype=torch.bool)) if any(call.outputs[1:]) else x


@row("Gelu")
@row("Gelu", "FastGelu", "BiasGelu", domain="com.microsoft")
def _gelu(call: OnnxCall) -> Result:
    x = call.x() + call.weight(1) if call.has(1) else call.x()
    return F.gelu(x, approximate="tanh" if call.op == "FastGelu" else call.get("approximate", "none"))


@row("QuickGelu", domain="com.microsoft")
@row("Swish")
def _swish(call: OnnxCall) -> Result:
    alpha, x = float(call.get("alpha", 1.702 if call.op == "QuickGelu" else 1.0)), call.x()
    return F.silu(x) if alpha == 1 else x * torch.sigmoid(x * alpha)


@row("Elu", "Selu", "Celu", "LeakyRelu", "ThresholdedRelu", "HardSigmoid")
def _activation(call: OnnxCall) -> Result:
    x, alpha = call.x(), call.get("alpha")
    given = 1.0 if alpha is None else alpha
    if call.op == "Selu":
        alpha = 1.67326319217681884765625 if alpha is None else alpha
        return aten.elu(x, alpha, call.get("gamma", 1.05070102214813232421875))
    if call.op == "HardSigmoid":
        return torch.clamp(x * float(0.2 if alpha is None else alpha) + float(call.get("beta", 0.5)), 0.0, 1.0)
    if call.op == "LeakyRelu":
        return F.leaky_relu(x, 0.01 if alpha is None else alpha)
    if call.op == "ThresholdedRelu":
        return F.threshold(x, given, 0.0)
    return F.celu(x, given) if call.op == "Celu" else F.elu(x, given)


@row("PRelu")
def _prelu(call: OnnxCall) -> Result:
    return aten._prelu_kernel(call.x(), call.weight(1))


@row("IsInf")
def _is_inf(call: OnnxCall) -> Result:
    x, positive, negative = call.x(), call.get("detect_positive", 1), call.get("detect_negative", 1)
    if positive and negative:
        return torch.isinf(x)
    if not positive and not negative:
        return torch.zeros(x.shape, dtype=torch.bool)
    return x == float("inf" if positive else "-inf")


#: Reduction -> what is reduced, how, and what is done with the sum.
REDUCTIONS: dict[str, tuple[Any, Any, Any]] = {
    "ReduceSum": (None, torch.sum, None), "ReduceMean": (None, torch.mean, None),
    "ReduceMax": (None, torch.amax, None), "ReduceMin": (None, torch.amin, None),
    "ReduceLogSumExp": (None, torch.logsumexp, None), "ReduceSumSquare": (torch.square, torch.sum, None),
    "ReduceLogSum": (None, torch.sum, torch.log), "ReduceProd": (None, None, None),
    "ReduceL1": (torch.abs, torch.linalg.vector_norm, None), "ReduceL2": (torch.abs, torch.linalg.vector_norm, None),
}  # fmt: skip


@row(*REDUCTIONS)
def _reduce(call: OnnxCall) -> Result:
    x, axes, keep = call.x(), call.axes(), bool(call.get("keepdims", 1))
    before, function, after = REDUCTIONS[call.op]
    if not axes and call.get("noop_with_empty_axes"):
        alone = x if before is None else before(x)
        return alone if after is None else after(alone)
    axes = axes or tuple(range(x.dim()))
    if call.op == "ReduceProd":
        for axis in sorted(axes, reverse=True):
            x = torch.prod(x, axis, keep, dtype=x.dtype)
        return x
    if function is torch.linalg.vector_norm:
        return torch.linalg.vector_norm(x, int(call.op[-1]), axes, keep)
    made = function(x if before is None else x * x, axes, keep).to(x.dtype) if axes else function(x, (), keep)
    return made if after is None else after(made)


@row("ArgMax", "ArgMin")
def _arg(call: OnnxCall) -> Result:
    if call.get("select_last_index"):
        return None
    function = torch.argmax if call.op == "ArgMax" else torch.argmin
    return function(call.x(), call.axis(0), bool(call.get("keepdims", 1)))


@row("CumSum")
def _cumsum(call: OnnxCall) -> Result:
    if call.get("exclusive"):
        return None
    x = call.x()
    dim = wrap(int(call.one(1)), x.dim())
    if not call.get("reverse"):
        return torch.cumsum(x, dim, dtype=x.dtype)
    return torch.cumsum(x.flip((dim,)), dim, dtype=x.dtype).flip((dim,))


@row("TopK")
def _topk(call: OnnxCall) -> Result:
    count, more = int(call.one(1, call.get("k", 1))), (bool(call.get(name, 1)) for name in ("largest", "sorted"))
    return torch.topk(call.x(), count, call.axis(-1), *more)


@row("Softmax", "LogSoftmax")
def _softmax(call: OnnxCall) -> Result:
    x, function = call.x(), torch.softmax if call.op == "Softmax" else torch.log_softmax
    axis = call.axis(-1 if call.version >= 13 else 1)
    if call.version >= 13 or axis == x.dim() - 1:
        return function(x, axis)
    return function(flattened(x, axis), 1).reshape(x.shape)


def flattened(x: torch.Tensor, axis: int) -> torch.Tensor:
    """A matrix with the dims before ``axis`` as its rows."""
    rows = 1
    for size in x.shape[:axis]:
        rows *= size
    return x.reshape(rows, x.numel() // rows if rows else -1)
