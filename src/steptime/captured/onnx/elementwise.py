"""Rows of element-wise operators, reductions, sorts and scans."""

from __future__ import annotations

import math
import operator
from functools import reduce
from typing import Any, Final

import torch
from torch.nn import functional as F

from steptime.captured.graph.strides import wrap
from steptime.captured.onnx.call import OnnxCall, Result, enter, row
from steptime.captured.onnx.tensor import dtype_of
from steptime.captured.record.values import TORCH_DTYPES

aten = torch.ops.aten

#: Operator of one tensor without arguments -> function of PyTorch.
MAPS: Final[dict[str, Any]] = {
    "Relu": torch.relu, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid, "Erf": torch.erf, "Exp": torch.exp,
    "Log": torch.log, "Sqrt": torch.sqrt, "Neg": torch.neg, "Abs": torch.abs, "Reciprocal": torch.reciprocal,
    "Floor": torch.floor, "Ceil": torch.ceil, "Round": torch.round, "Sin": torch.sin, "Cos": torch.cos,
    "Tan": torch.tan, "Asin": torch.asin, "Acos": torch.acos, "Atan": torch.atan, "Sinh": torch.sinh,
    "Cosh": torch.cosh, "Asinh": torch.asinh, "Acosh": torch.acosh, "Atanh": torch.atanh, "Sign": torch.sign,
    "Not": torch.logical_not, "IsNaN": torch.isnan, "BitwiseNot": torch.bitwise_not, "Softplus": F.softplus,
    "Mish": F.mish, "HardSwish": F.hardswish, "Softsign": F.softsign,
}  # fmt: skip

#: Operator of two tensors, either of which may be a number -> function.
PAIRS: Final[dict[str, Any]] = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Equal": operator.eq, "Greater": operator.gt,
    "GreaterOrEqual": operator.ge, "Less": operator.lt, "LessOrEqual": operator.le, "BitwiseAnd": operator.and_,
    "BitwiseOr": operator.or_, "BitwiseXor": operator.xor,
}  # fmt: skip
LOGIC: Final = {"And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor}
MANY: Final = {"Max": torch.maximum, "Min": torch.minimum, "Sum": operator.add, "Mean": operator.add}


def operands(c: OnnxCall) -> tuple[Any, Any]:
    """Two inputs, of which at most one is a known number."""
    a, b = c.operand(0, 1), c.operand(1, 0)
    return (a if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) else c.x()), b


enter(dict.fromkeys(MAPS, lambda c: MAPS[c.op](c.x())))
enter(dict.fromkeys(PAIRS, lambda c: PAIRS[c.op](*operands(c))))
enter(dict.fromkeys(LOGIC, lambda c: LOGIC[c.op](c.x(), c.x(1))))
enter({
    "Cast": lambda c: c.x().to(TORCH_DTYPES[dtype_of(int(c.get("to", 0)))]),
    "CastLike": lambda c: c.x().to(TORCH_DTYPES[c.tensor(1).dtype]),
    "Identity": lambda c: c.tensor(0),
    "Where": lambda c: torch.where(c.x(), c.x(1), c.x(2)),
    "Pow": lambda c: operator.pow(*operands(c)).to(TORCH_DTYPES[c.tensor(0).dtype]),
    "Mod": lambda c: (torch.fmod if c.get("fmod") else torch.remainder)(c.x(), c.operand(1, 0)),
    "BitShift": lambda c: (operator.lshift if c.get("direction") == "LEFT" else operator.rshift)(c.x(), c.operand(1)),
    "Gelu": lambda c: F.gelu(c.x(), approximate=c.get("approximate", "none")),
    "Elu": lambda c: F.elu(c.x(), c.get("alpha", 1.0)),
    "Celu": lambda c: F.celu(c.x(), c.get("alpha", 1.0)),
    "Selu": lambda c: aten.elu(c.x(), c.get("alpha", 1.67326319217681885), c.get("gamma", 1.05070102214813232)),
    "LeakyRelu": lambda c: F.leaky_relu(c.x(), c.get("alpha", 0.01)),
    "ThresholdedRelu": lambda c: F.threshold(c.x(), c.get("alpha", 1.0), 0.0),
    "HardSigmoid": lambda c: torch.clamp(c.x() * float(c.get("alpha", 0.2)) + float(c.get("beta", 0.5)), 0.0, 1.0),
    "PRelu": lambda c: aten._prelu_kernel(c.x(), c.weight(1)),
    "Swish": lambda c: _swish(c.x(), float(c.get("alpha", 1.0))),
    "Softmax": lambda c: _softmax(c, torch.softmax),
    "LogSoftmax": lambda c: _softmax(c, torch.log_softmax),
    "ArgMax": lambda c: _arg(c, torch.argmax),
    "ArgMin": lambda c: _arg(c, torch.argmin),
    "TopK": lambda c: torch.topk(
        c.x(), int(c.one(1, c.get("k", 1))), c.axis(-1), bool(c.get("largest", 1)), bool(c.get("sorted", 1))
    ),
})  # fmt: skip
enter({
    "Gelu": lambda c: F.gelu(c.x()),
    "BiasGelu": lambda c: F.gelu(c.x() + c.weight(1)),
    "FastGelu": lambda c: F.gelu(c.x() + c.weight(1) if c.has(1) else c.x(), approximate="tanh"),
    "QuickGelu": lambda c: _swish(c.x(), float(c.get("alpha", 1.702))),
}, domain="com.microsoft")  # fmt: skip


def _swish(x: torch.Tensor, alpha: float) -> torch.Tensor:
    return F.silu(x) if alpha == 1 else x * torch.sigmoid(x * alpha)


@row("Div")
def _div(c: OnnxCall) -> Result:
    if c.tensor(0).dtype.startswith(("int", "uint")):
        return torch.div(c.x(), c.operand(1, 0), rounding_mode="trunc")
    a, b = operands(c)
    return torch.reciprocal(b) if isinstance(a, float) and a == 1 else a / b


@row(*MANY)
def _many(c: OnnxCall) -> Result:
    total = reduce(MANY[c.op], c.all())
    return total / len(c.inputs) if c.op == "Mean" and len(c.inputs) > 1 else total


@row("Clip")
def _clip(c: OnnxCall) -> Result:
    """Clamp to bounds; a computed bound needs an operator of its own."""
    x, bounds = c.x(), dict[str, Any]()
    for index, name in ((1, "min"), (2, "max")):
        if c.get(name) is not None or c.has(index):
            bounds[name] = c.operand(index) if c.get(name) is None else float(c.get(name))
    if not any(isinstance(bound, torch.Tensor) for bound in bounds.values()):
        return torch.clamp(x, **bounds) if bounds else x
    for name, bound in bounds.items():
        other = bound if isinstance(bound, torch.Tensor) else torch.full((), bound, dtype=x.dtype)
        x = (torch.maximum if name == "min" else torch.minimum)(x, other)
    return x


@row("Dropout")
def _dropout(c: OnnxCall) -> Result:
    if c.one(2, False):
        return torch.native_dropout(c.x(), float(c.one(1, 0.5)), True)
    return (c.x(), torch.ones(c.tensor(0).shape, dtype=torch.bool)) if any(c.outputs[1:]) else c.x()


@row("IsInf")
def _is_inf(c: OnnxCall) -> Result:
    x, signs = c.x(), [c.get(f"detect_{name}", 1) for name in ("positive", "negative")]
    if all(signs):
        return torch.isinf(x)
    return x == float("inf" if signs[0] else "-inf") if any(signs) else torch.zeros(x.shape, dtype=torch.bool)


#: Reduction -> map before it, the reduction, map after it.
REDUCTIONS: Final[dict[str, tuple[Any, Any, Any]]] = {
    "ReduceSum": (None, torch.sum, None), "ReduceMean": (None, torch.mean, None),
    "ReduceMax": (None, torch.amax, None), "ReduceMin": (None, torch.amin, None),
    "ReduceLogSumExp": (None, torch.logsumexp, None), "ReduceLogSum": (None, torch.sum, torch.log),
    "ReduceSumSquare": (lambda x: x * x, torch.sum, None),
    "ReduceL1": (None, lambda x, *more: torch.linalg.vector_norm(x, 1, *more), torch.abs),
    "ReduceL2": (None, lambda x, *more: torch.linalg.vector_norm(x, 2, *more), torch.abs),
    "ReduceProd": (None, lambda x, axes, keep: reduce(lambda y, d: y.prod(d, keep), sorted(axes)[::-1], x), None),
}  # fmt: skip


@row(*REDUCTIONS)
def _reduce(c: OnnxCall) -> Result:
    x, axes, keep = c.x(), c.axes(), bool(c.get("keepdims", 1))
    before, function, after = REDUCTIONS[c.op]
    norm = c.op in ("ReduceL1", "ReduceL2")
    x = x if before is None else before(x)
    if axes or not c.get("noop_with_empty_axes"):
        x = function(x, axes or tuple(range(x.dim())), keep).to(x.dtype)
        return x if after is None or norm else after(x)
    return x if after is None else after(x)


def _arg(c: OnnxCall, function: Any) -> Result:
    return None if c.get("select_last_index") else function(c.x(), c.axis(0), bool(c.get("keepdims", 1)))


@row("CumSum")
def _cumsum(c: OnnxCall) -> Result:
    if c.get("exclusive"):
        return None
    x = c.x()
    dim = wrap(int(c.one(1)), x.dim())
    if not c.get("reverse"):
        return torch.cumsum(x, dim, dtype=x.dtype)
    return torch.cumsum(x.flip((dim,)), dim, dtype=x.dtype).flip((dim,))


def _softmax(c: OnnxCall, function: Any) -> Result:
    x, axis = c.x(), c.axis(-1 if c.version >= 13 else 1)
    return function(x, axis) if c.version >= 13 else function(flattened(x, axis), 1).reshape(x.shape)


def flattened(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Matrix with the dims before ``axis`` as rows."""
    rows = math.prod(x.shape[:axis])
    return x.reshape(rows, x.numel() // rows if rows else -1)
