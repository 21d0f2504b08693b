"""Gradients of products and of convolutions."""

from __future__ import annotations

from steptime.captured.aten.layout import tensor_type
from steptime.captured.aten.maths import bmm, broadcast_dims, mm, mul, reduce
from steptime.captured.aten.views import expand, reshape, t, transpose, unsqueeze
from steptime.captured.autodiff.table import BILINEAR, Pulled, Step, linear, reverse
from steptime.captured.graph.node import Attribute, Nodes, Value

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
