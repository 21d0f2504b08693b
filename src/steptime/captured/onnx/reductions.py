"""Rows of reductions, sorts and scans."""

from __future__ import annotations

from steptime.captured.aten import layers, maths, views
from steptime.captured.aten.layout import like, tensor_type
from steptime.captured.graph.node import Attribute, Value
from steptime.captured.onnx.call import OnnxCall, Result, row

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
