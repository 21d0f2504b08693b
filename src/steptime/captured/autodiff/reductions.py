"""Gradients of operators that sum: matrix products, convolutions, reductions, pooling."""

from __future__ import annotations

from steptime.captured.aten import maths
from steptime.captured.aten.maths import binary, bmm, broadcast_dims, div, mm, mul, reduce, spread, sub, unary
from steptime.captured.aten.views import expand, like, reshape, t, tensor_type, transpose, unsqueeze, wrap
from steptime.captured.autodiff.table import BILINEAR, Pulled, Step, linear, reverse
from steptime.captured.graph.program import Attribute, Nodes, Value

BILINEAR.update({
    "mm": ("self", "mat2"), "bmm": ("self", "mat2"), "dot": ("self", "tensor"), "mv": ("self", "vec"),
})  # fmt: skip
linear("constant_pad_nd", "self")


def _scaled(nodes: Nodes, x: Value, factor: float) -> Value:
    return x if factor == 1 else mul(nodes, x, factor)


@reverse("mm")
def _mm(step: Step) -> Pulled:
    nodes, a, b = step.nodes, step.input("self"), step.input("mat2")
    pulled = {}
    if step.needs("mat2"):
        pulled["mat2"] = mm(nodes, t(nodes, a), step.grad)
    if step.needs("self"):
        pulled["self"] = mm(nodes, step.grad, t(nodes, b))
    return pulled


@reverse("addmm")
def _addmm(step: Step) -> Pulled:
    nodes, a, b = step.nodes, step.input("mat1"), step.input("mat2")
    alpha, pulled = step.number("alpha", 1), {}
    if step.needs("self"):
        pulled["self"] = _bias(step)
    if step.needs("mat1"):
        pulled["mat1"] = _scaled(nodes, mm(nodes, step.grad, t(nodes, b)), alpha)
    if step.needs("mat2"):
        pulled["mat2"] = _scaled(nodes, mm(nodes, t(nodes, a), step.grad), alpha)
    return pulled


def _bias(step: Step) -> Value:
    grad = _scaled(step.nodes, step.grad, step.number("beta", 1))
    return bias_gradient(step.nodes, grad, step.input("self").type.shape)


def bias_gradient(nodes: Nodes, grad: Value, shape: tuple[int, ...]) -> Value:
    """The sum over rows, with the rows kept as one and then seen in the shape of the bias, as PyTorch does it."""
    leading, widened = broadcast_dims(grad.type.shape, shape)
    dims = leading + widened
    if not dims:
        return grad
    return reshape(nodes, reduce(nodes, "sum", grad, dims, True), shape)


@reverse("bmm")
def _bmm(step: Step) -> Pulled:
    nodes, a, b = step.nodes, step.input("self"), step.input("mat2")
    pulled = {}
    if step.needs("mat2"):
        pulled["mat2"] = bmm(nodes, transpose(nodes, a, 1, 2), step.grad)
    if step.needs("self"):
        pulled["self"] = bmm(nodes, step.grad, transpose(nodes, b, 1, 2))
    return pulled


@reverse("baddbmm")
def _baddbmm(step: Step) -> Pulled:
    nodes, a, b = step.nodes, step.input("batch1"), step.input("batch2")
    alpha, pulled = step.number("alpha", 1), {}
    if step.needs("self"):
        pulled["self"] = _bias(step)
    if step.needs("batch1"):
        pulled["batch1"] = _scaled(nodes, bmm(nodes, step.grad, transpose(nodes, b, 1, 2)), alpha)
    if step.needs("batch2"):
        pulled["batch2"] = _scaled(nodes, bmm(nodes, transpose(nodes, a, 1, 2), step.grad), alpha)
    return pulled


@reverse("mv")
def _mv(step: Step) -> Pulled:
    nodes, matrix, vector = step.nodes, step.input("self"), step.input("vec")
    pulled = {}
    if step.needs("self"):
        rows = expand(nodes, unsqueeze(nodes, step.grad, 1), matrix.type.shape)
        pulled["self"] = mul(nodes, rows, vector)
    if step.needs("vec"):
        output = tensor_type((matrix.type.shape[1],), matrix.type.dtype)
        inputs = {"self": t(nodes, matrix), "vec": step.grad}
        pulled["vec"] = nodes.apply("mv", inputs, outputs=[output]).value()
    return pulled


@reverse("dot")
def _dot(step: Step) -> Pulled:
    grad, a, b = step.grad, step.input("self"), step.input("tensor")
    return {"self": mul(step.nodes, b, grad), "tensor": mul(step.nodes, a, grad)}


_CONVOLUTION = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


@reverse("convolution")
def _convolution(step: Step) -> Pulled:
    """One ``convolution_backward`` for all three gradients; it gives only those that are asked for."""
    x, weight, bias = step.input("input"), step.input("weight"), step.maybe("bias")
    wanted = ("input", "weight", "bias")
    mask = tuple(step.needs(name) for name in wanted)
    attributes: dict[str, Attribute] = {} if bias is None else {"bias_sizes": bias.type.shape}
    attributes |= {**step.kept(*_CONVOLUTION), "output_mask": mask}
    types = {"input": x.type, "weight": weight.type, "bias": None if bias is None else bias.type}
    names = [name for name in wanted if step.needs(name)]
    outputs = [tensor_type(type.shape, type.dtype) for name in names if (type := types[name]) is not None]
    inputs = {"grad_output": step.grad, "input": x, "weight": weight}
    made = step.nodes.apply("convolution_backward", inputs, attributes, outputs=outputs)
    return {name: made.value(index) for index, name in enumerate(names)}


for _name in ("sum", "mean", "avg_pool1d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "upsample_nearest2d",
              "upsample_bilinear2d", "mean.dim"):  # fmt: skip
    linear(_name, "self")


def _dims(step: Step) -> tuple[int, ...]:
    """Dims that were reduced; all of them where none are named."""
    return step.ints("dim") or tuple(range(step.input("self").type.rank))


def _spread(step: Step, x: Value) -> Value:
    shape = step.input("self").type.shape
    return spread(step.nodes, x, shape, _dims(step), bool(step.get("keepdim", False)))


def _restored(step: Step, x: Value) -> Value:
    """A reduced tensor with its dims of size 1 back, to be broadcast."""
    if step.get("keepdim", False):
        return x
    for dim in sorted(wrap(d, step.input("self").type.rank) for d in _dims(step)):
        x = unsqueeze(step.nodes, x, dim)
    return x


def _count(step: Step) -> int:
    shape = step.input("self").type.shape
    out = 1
    for dim in _dims(step):
        out *= shape[dim]
    return out


@reverse("sum")
def _sum(step: Step) -> Pulled:
    return {"self": maths.to(step.nodes, _spread(step, step.grad), step.input("self").type.dtype)}


@reverse("mean")
def _mean(step: Step) -> Pulled:
    grad = div(step.nodes, _spread(step, step.grad), _count(step))
    return {"self": maths.to(step.nodes, grad, step.input("self").type.dtype)}


@reverse("amax", "amin")
def _extreme(step: Step) -> Pulled:
    """Shared equally by all places that hold the extreme."""
    nodes, x = step.nodes, step.input("self")
    mask = binary(nodes, "eq", x, _restored(step, step.output()))
    share = maths.to(nodes, reduce(nodes, "sum", mask, _dims(step), True), x.type.dtype)
    return {"self": mul(nodes, div(nodes, _restored(step, step.grad), share), mask)}


@reverse("max", "min", "topk", "sort", "kthvalue", "median", "mode")
def _selected(step: Step) -> Pulled:
    """The gradient goes to the places that the indices name."""
    nodes, x = step.nodes, step.input("self")
    if len(step.node.outputs) < 2:
        mask = binary(nodes, "eq", x, step.output())
        share = maths.to(nodes, reduce(nodes, "sum", mask, range(x.type.rank), False), x.type.dtype)
        return {"self": mul(nodes, div(nodes, step.grad, share), mask)}
    attributes: dict[str, Attribute] = {
        "dim": step.get("dim", -1),
        "sizes": x.type.shape,
        "keepdim": step.node.op in ("topk", "sort") or bool(step.get("keepdim", False)),
    }
    inputs = {"grad": step.grad, "indices": step.output(1)}
    output = tensor_type(x.type.shape, step.grad.type.dtype)
    made = nodes.apply("value_selecting_reduction_backward", inputs, attributes, outputs=[output])
    return {"self": made.value()}


@reverse("logsumexp")
def _logsumexp(step: Step) -> Pulled:
    nodes, x = step.nodes, step.input("self")
    weights = unary(nodes, "exp", sub(nodes, x, _restored(step, step.output())))
    return {"self": mul(nodes, _restored(step, step.grad), weights)}


def _correction(step: Step) -> float:
    if step.get("unbiased") is not None:
        return 1.0 if step.get("unbiased") else 0.0
    return step.number("correction", 1)


@reverse("var", "std", "var_mean")
def _variance(step: Step) -> Pulled:
    """2 (x - mean) / (n - correction), and for the root, over twice the root."""
    nodes, x, total = step.nodes, step.input("self"), None
    if step.grads[0] is not None:
        grad = step.grad
        if step.node.op == "std":
            grad = div(nodes, grad, mul(nodes, step.output(), 2))
        centred = sub(nodes, x, reduce(nodes, "mean", x, _dims(step), True))
        scaled = mul(nodes, _restored(step, grad), 2.0 / (_count(step) - _correction(step)))
        total = mul(nodes, scaled, centred)
    if step.node.op == "var_mean" and step.grads[1] is not None:
        mean = div(nodes, _spread(step, step.grads[1]), _count(step))
        total = mean if total is None else maths.add(nodes, total, mean)
    return {"self": total}


@reverse("linalg_vector_norm")
def _norm(step: Step) -> Pulled:
    nodes, x, order = step.nodes, step.input("self"), step.number("ord", 2)
    grad = _restored(step, step.grad)
    if order == 1:
        return {"self": mul(nodes, unary(nodes, "sgn", x), grad)}
    if order != 2:
        raise NotImplementedError(f"order {order}")
    norm = _restored(step, step.output())
    ratio = div(nodes, grad, norm)
    zero = binary(nodes, "eq", norm, 0)
    attributes: dict[str, Attribute] = {"value": 0}
    safe = nodes.apply("masked_fill", {"self": ratio, "mask": zero}, attributes, outputs=[like(ratio.type)]).value()
    return {"self": mul(nodes, x, safe)}


def _pooled(step: Step, op: str, inputs: dict[str, Value], *kept: str) -> Value:
    output = tensor_type(step.input("self").type.shape, step.grad.type.dtype)
    return step.nodes.apply(op, inputs, step.kept(*kept), outputs=[output]).value()


@reverse("max_pool2d_with_indices", "max_pool3d_with_indices")
def _max_pool(step: Step) -> Pulled:
    nodes, rank = step.nodes, 2 if step.node.op == "max_pool2d_with_indices" else 3
    kernel = step.ints("kernel_size")
    attributes: dict[str, Attribute] = {
        "kernel_size": kernel, "stride": step.ints("stride") or kernel, "padding": step.ints("padding", (0,) * rank),
        "dilation": step.ints("dilation", (1,) * rank), "ceil_mode": step.get("ceil_mode", False),
    }  # fmt: skip
    inputs = {"grad_output": step.grad, "self": step.input("self"), "indices": step.output(1)}
    output = tensor_type(step.input("self").type.shape, step.grad.type.dtype)
    return {"self": nodes.apply(f"{step.node.op}_backward", inputs, attributes, outputs=[output]).value()}


@reverse("avg_pool2d", "avg_pool3d")
def _avg_pool(step: Step) -> Pulled:
    rank = int(step.node.op[-2])
    kernel = step.ints("kernel_size")
    attributes: dict[str, Attribute] = {
        "kernel_size": kernel, "stride": step.ints("stride") or kernel, "padding": step.ints("padding", (0,) * rank),
        "ceil_mode": step.get("ceil_mode", False), "count_include_pad": step.get("count_include_pad", True),
        "divisor_override": step.get("divisor_override"),
    }  # fmt: skip
    inputs = {"grad_output": step.grad, "self": step.input("self")}
    output = tensor_type(step.input("self").type.shape, step.grad.type.dtype)
    return {"self": step.nodes.apply(f"{step.node.op}_backward", inputs, attributes, outputs=[output]).value()}


@reverse("_adaptive_avg_pool2d")
def _adaptive(step: Step) -> Pulled:
    return {
        "self": _pooled(step, "_adaptive_avg_pool2d_backward", {"grad_output": step.grad, "self": step.input("self")})
    }


@reverse("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d",
         "upsample_bicubic2d", "upsample_trilinear3d")  # fmt: skip
def _upsample(step: Step) -> Pulled:
    shape = step.input("self").type.shape
    attributes: dict[str, Attribute] = {"output_size": step.grad.type.shape[2:], "input_size": shape}
    attributes |= step.kept("align_corners", "scales", "scales_d", "scales_h", "scales_w")
    output = tensor_type(shape, step.grad.type.dtype)
    inputs = {"grad_output": step.grad}
    return {"self": step.nodes.apply(f"{step.node.op}_backward", inputs, attributes, outputs=[output]).value()}
