"""Gradients of operators that work on each element by itself, in the form in which PyTorch computes them."""

from __future__ import annotations

import math
from collections.abc import Callable

from steptime.captured.aten.maths import Operand, add, binary, div, full, mul, pointwise, power, sub, to, unary, where
from steptime.captured.aten.views import like
from steptime.captured.autodiff.table import Pulled, Step, elementwise
from steptime.captured.graph.program import Attribute, Nodes, Value

#: Operators of one tensor with a fused backward: name of it, what it reads besides the gradient, arguments it repeats.
FUSED: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "tanh": ("tanh_backward", "output", "result", ()),
    "sigmoid": ("sigmoid_backward", "output", "result", ()),
    "silu": ("silu_backward", "self", "self", ()),
    "mish": ("mish_backward", "self", "self", ()),
    "hardswish": ("hardswish_backward", "self", "self", ()),
    "hardsigmoid": ("hardsigmoid_backward", "self", "self", ()),
    "gelu": ("gelu_backward", "self", "self", ("approximate",)),
}

#: Operators of one tensor: gradient from (nodes, gradient, input, result).
FORMULAS: dict[str, Callable[[Nodes, Value, Value, Value], Value]] = {
    "neg": lambda n, g, x, y: unary(n, "neg", g),
    "exp": lambda n, g, x, y: mul(n, g, y),
    "expm1": lambda n, g, x, y: mul(n, g, add(n, y, 1)),
    "log": lambda n, g, x, y: div(n, g, x),
    "log1p": lambda n, g, x, y: div(n, g, add(n, x, 1)),
    "log2": lambda n, g, x, y: div(n, g, mul(n, x, math.log(2.0))),
    "sqrt": lambda n, g, x, y: div(n, g, mul(n, y, 2)),
    "rsqrt": lambda n, g, x, y: mul(n, mul(n, g, -0.5), power(n, y, 3)),
    "reciprocal": lambda n, g, x, y: mul(n, unary(n, "neg", g), mul(n, y, y)),
    "square": lambda n, g, x, y: mul(n, g, mul(n, x, 2.0)),
    "sin": lambda n, g, x, y: mul(n, g, unary(n, "cos", x)),
    "cos": lambda n, g, x, y: mul(n, g, unary(n, "neg", unary(n, "sin", x))),
    "tan": lambda n, g, x, y: mul(n, g, add(n, power(n, y, 2), 1)),
    "atan": lambda n, g, x, y: div(n, g, add(n, mul(n, x, x), 1)),
    "asin": lambda n, g, x, y: mul(n, g, unary(n, "rsqrt", pointwise(n, "rsub", {"self": mul(n, x, x), "other": 1}))),
    "acos": lambda n, g, x, y: mul(
        n, g, unary(n, "neg", unary(n, "rsqrt", pointwise(n, "rsub", {"self": mul(n, x, x), "other": 1})))
    ),
    "sinh": lambda n, g, x, y: mul(n, g, unary(n, "cosh", x)),
    "cosh": lambda n, g, x, y: mul(n, g, unary(n, "sinh", x)),
    "asinh": lambda n, g, x, y: mul(n, g, unary(n, "rsqrt", add(n, power(n, x, 2), 1))),
    "atanh": lambda n, g, x, y: div(n, g, pointwise(n, "rsub", {"self": power(n, x, 2), "other": 1})),
    "erf": lambda n, g, x, y: mul(
        n, mul(n, unary(n, "exp", unary(n, "neg", power(n, x, 2))), 2 / math.sqrt(math.pi)), g
    ),
    "abs": lambda n, g, x, y: mul(n, g, unary(n, "sgn", x)),
    "relu": lambda n, g, x, y: fused(n, "threshold_backward", {"grad_output": g, "self": y}, {"threshold": 0}),
}


def fused(nodes: Nodes, op: str, inputs: dict[str, Value], attributes: dict[str, Attribute] | None = None) -> Value:
    """A backward operator that takes the gradient first and gives a tensor like the second input."""
    of = list(inputs.values())[-1]
    return nodes.apply(op, inputs, attributes, outputs=[like(of.type)]).value()


@elementwise(*FORMULAS)
def _formula(step: Step) -> Pulled:
    return {"self": FORMULAS[step.node.op](step.nodes, step.grad, step.input("self"), step.output())}


@elementwise(*FUSED)
def _fused(step: Step) -> Pulled:
    op, name, read, more = FUSED[step.node.op]
    value = step.input("self") if read == "self" else step.output()
    return {"self": fused(step.nodes, op, {"grad_output": step.grad, name: value}, step.kept(*more))}


@elementwise("threshold", "leaky_relu", "elu", "celu", "softplus", "hardtanh")
def _with_arguments(step: Step) -> Pulled:
    defaults: dict[str, dict[str, Attribute]] = {
        "threshold": {"threshold": 0},
        "leaky_relu": {"negative_slope": 0.01, "self_is_result": False},
        "elu": {"alpha": 1.0, "scale": 1.0, "input_scale": 1.0, "is_result": False},
        "softplus": {"beta": 1, "threshold": 20},
        "hardtanh": {"min_val": -1, "max_val": 1},
    }
    op = step.node.op
    if op == "celu":
        alpha = step.number("alpha", 1.0)
        defaults["celu"] = {"alpha": alpha, "scale": 1.0, "input_scale": 1.0 / alpha, "is_result": False}
    attributes = {name: step.get(name, value) for name, value in defaults[op].items()}
    op = "elu" if op == "celu" else op
    name = "self_or_result" if op == "elu" else "self"
    inputs = {"grad_output": step.grad, name: step.input("self")}
    return {"self": fused(step.nodes, f"{op}_backward", inputs, attributes)}


@elementwise("add", "sub", "rsub")
def _sum(step: Step) -> Pulled:
    nodes, grad, alpha = step.nodes, step.grad, step.number("alpha", 1)
    scaled = grad if alpha == 1 else mul(nodes, grad, alpha)
    negative = unary(nodes, "neg", grad) if step.node.op == "rsub" and step.needs("self") else grad
    if step.node.op == "sub" and step.needs("other"):
        scaled = unary(nodes, "neg", scaled)
    return {"self": negative, "other": scaled}


def _other(step: Step) -> Operand:
    found = step.maybe("other")
    return step.number("other", 0.0) if found is None else found


@elementwise("mul")
def _product(step: Step) -> Pulled:
    pulled: dict[str, Value] = {}
    if step.needs("self"):
        pulled["self"] = mul(step.nodes, step.grad, _other(step))
    if step.needs("other"):
        pulled["other"] = mul(step.nodes, step.grad, step.input("self"))
    return pulled


@elementwise("div")
def _quotient(step: Step) -> Pulled:
    nodes, pulled = step.nodes, dict[str, Value]()
    if step.get("rounding_mode") is not None:
        return pulled
    if step.needs("self"):
        pulled["self"] = div(nodes, step.grad, _other(step))
    if step.needs("other"):
        x, d = step.input("self"), step.input("other")
        pulled["other"] = mul(nodes, unary(nodes, "neg", step.grad), div(nodes, div(nodes, x, d), d))
    return pulled


@elementwise("pow")
def _power(step: Step) -> Pulled:
    nodes, grad, pulled = step.nodes, step.grad, dict[str, Value]()
    base, exponent = step.maybe("self"), step.maybe("exponent")
    if exponent is None:
        p = step.number("exponent", 1.0)
        if base is not None and p != 0:
            reduced = base if p == 2 else power(nodes, base, p - 1)
            pulled["self"] = mul(nodes, grad, mul(nodes, reduced, p))
        return pulled
    if step.needs("self") and base is not None:
        slope = mul(nodes, grad, mul(nodes, exponent, power(nodes, base, sub(nodes, exponent, 1))))
        zero = full(nodes, (), 0, grad.type.dtype)
        pulled["self"] = where(nodes, binary(nodes, "eq", exponent, 0), zero, slope)
    if step.needs("exponent"):
        if base is None:
            pulled["exponent"] = mul(nodes, grad, mul(nodes, step.output(), math.log(step.number("self", 1.0))))
        else:
            pulled["exponent"] = mul(nodes, grad, mul(nodes, step.output(), unary(nodes, "log", base)))
    return pulled


@elementwise("maximum", "minimum")
def _extreme(step: Step) -> Pulled:
    """The gradient goes to the larger (smaller) one; where they are equal, half to each."""
    nodes, a, b = step.nodes, step.input("self"), step.input("other")
    half = where(nodes, binary(nodes, "eq", a, b), div(nodes, step.grad, 2), step.grad)
    lost = ("lt", "gt") if step.node.op == "maximum" else ("gt", "lt")
    pulled = {}
    for name, op in zip(("self", "other"), lost, strict=True):
        if step.needs(name):
            pulled[name] = _blank(nodes, half, binary(nodes, op, a, b))
    return pulled


def _blank(nodes: Nodes, x: Value, mask: Value) -> Value:
    """``x``, zero where the mask holds."""
    return nodes.apply("masked_fill", {"self": x, "mask": mask}, {"value": 0}, outputs=[like(x.type)]).value()


@elementwise("clamp", "clamp_min", "clamp_max")
def _clamp(step: Step) -> Pulled:
    nodes, x = step.nodes, step.input("self")
    conditions = [
        binary(nodes, op, x, step.number(name, 0.0))
        for name, op in (("min", "ge"), ("max", "le"))
        if step.get(name) is not None
    ]
    if not conditions:
        return {"self": step.grad}
    inside = conditions[0] if len(conditions) == 1 else binary(nodes, "logical_and", *conditions)
    return {"self": where(nodes, inside, step.grad, full(nodes, (), 0, step.grad.type.dtype))}


@elementwise("where")
def _choice(step: Step) -> Pulled:
    nodes, condition, zero = step.nodes, step.input("condition"), full(step.nodes, (), 0, step.grad.type.dtype)
    pulled = {}
    if step.needs("self"):
        pulled["self"] = where(nodes, condition, step.grad, zero)
    if step.needs("other"):
        pulled["other"] = where(nodes, condition, zero, step.grad)
    return pulled


@elementwise("masked_fill")
def _masked_fill(step: Step) -> Pulled:
    nodes, mask = step.nodes, step.input("mask")
    pulled = {"self": _blank(nodes, step.grad, mask)}
    if step.needs("value"):
        pulled["value"] = where(nodes, mask, step.grad, full(nodes, (), 0, step.grad.type.dtype))
    return pulled


@elementwise("_to_copy", "clone", "alias", "contiguous", "lift_fresh")
def _copy(step: Step) -> Pulled:
    return {"self": to(step.nodes, step.grad, step.input("self").type.dtype)}


@elementwise("addcmul", "addcdiv")
def _scaled_sum(step: Step) -> Pulled:
    nodes, scale = step.nodes, step.number("value", 1)
    a, b = step.input("tensor1"), step.input("tensor2")
    grad = step.grad if scale == 1 else mul(nodes, step.grad, scale)
    if step.node.op == "addcmul":
        return {"self": step.grad, "tensor1": mul(nodes, grad, b), "tensor2": mul(nodes, grad, a)}
    quotient = div(nodes, grad, b)
    negative = unary(nodes, "neg", quotient)
    return {"self": step.grad, "tensor1": quotient, "tensor2": mul(nodes, negative, div(nodes, a, b))}


@elementwise("native_dropout")
def _dropout(step: Step) -> Pulled:
    if not step.get("train", True):
        return {"input": step.grad}
    p = step.number("p", 0.5)
    attributes: dict[str, Attribute] = {"scale": 0.0 if p == 1 else 1.0 / (1.0 - p)}
    inputs = {"grad_output": step.grad, "mask": step.output(1)}
    made = step.nodes.apply("native_dropout_backward", inputs, attributes, outputs=[like(step.grad.type)])
    return {"input": made.value()}


@elementwise("_prelu_kernel")
def _prelu(step: Step) -> Pulled:
    x, weight = step.input("self"), step.input("weight")
    inputs = {"grad_output": step.grad, "self": x, "weight": weight}
    made = step.nodes.apply("_prelu_kernel_backward", inputs, outputs=[like(x.type), like(x.type)])
    return {"self": made.value(0), "weight": made.value(1)}


@elementwise("log_sigmoid_forward")
def _log_sigmoid(step: Step) -> Pulled:
    inputs = {"grad_output": step.grad, "self": step.input("self"), "buffer": step.output(1)}
    made = step.nodes.apply("log_sigmoid_backward", inputs, outputs=[like(step.grad.type)])
    return {"self": made.value()}


@elementwise("fmod", "remainder")
def _remainder(step: Step) -> Pulled:
    return {"self": step.grad}
