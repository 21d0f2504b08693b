"""Gradients of layers: normalisation, softmax, losses, attention."""

from __future__ import annotations

from steptime.captured.aten.maths import div, mul, sub, unary
from steptime.captured.aten.views import like, tensor_type
from steptime.captured.autodiff.table import SYMMETRIC, Pulled, Step, reverse
from steptime.captured.graph.program import Attribute, TensorType, Value

SYMMETRIC.update({"_softmax"})


@reverse("_softmax", "_log_softmax")
def _softmax(step: Step) -> Pulled:
    attributes: dict[str, Attribute] = {
        "dim": step.get("dim", -1),
        "input_dtype": step.input("self").type.dtype,
    }
    inputs = {"grad_output": step.grad, "output": step.output()}
    output = tensor_type(step.grad.type.shape, step.input("self").type.dtype)
    made = step.nodes.apply(f"{step.node.op}_backward_data", inputs, attributes, outputs=[output])
    return {"self": made.value()}


def _masked(
    step: Step, op: str, inputs: dict[str, Value | None], attributes: dict[str, Attribute], names: tuple[str, ...]
) -> Pulled:
    """A backward operator with an ``output_mask``: it gives the gradients that are asked for, in that order."""
    wanted = [name for name in names if step.needs(name)]
    mask = tuple(name in wanted for name in names)
    types = [step.input(name).type for name in wanted]
    outputs = [tensor_type(type.shape, type.dtype) for type in types]
    made = step.nodes.apply(op, inputs, {**attributes, "output_mask": mask}, outputs=outputs)
    return {name: made.value(index) for index, name in enumerate(wanted)}


@reverse("native_layer_norm")
def _layer_norm(step: Step) -> Pulled:
    inputs = {
        "grad_out": step.grad, "input": step.input("input"), "mean": step.output(1), "rstd": step.output(2),
        "weight": step.maybe("weight"), "bias": step.maybe("bias"),
    }  # fmt: skip
    kept = step.kept("normalized_shape")
    return _masked(step, "native_layer_norm_backward", inputs, kept, ("input", "weight", "bias"))


@reverse("_fused_rms_norm")
def _rms_norm(step: Step) -> Pulled:
    inputs = {
        "grad_out": step.grad, "input": step.input("input"), "rstd": step.output(1), "weight": step.maybe("weight"),
    }  # fmt: skip
    return _masked(step, "_fused_rms_norm_backward", inputs, step.kept("normalized_shape"), ("input", "weight"))


@reverse("native_group_norm")
def _group_norm(step: Step) -> Pulled:
    inputs = {
        "grad_out": step.grad, "input": step.input("input"), "mean": step.output(1), "rstd": step.output(2),
        "weight": step.maybe("weight"),
    }  # fmt: skip
    kept = step.kept("N", "C", "HxW", "group")
    return _masked(step, "native_group_norm_backward", inputs, kept, ("input", "weight", "bias"))


@reverse("native_batch_norm", "_native_batch_norm_legit")
def _batch_norm(step: Step) -> Pulled:
    training = bool(step.get("training", False))
    inputs = {
        "grad_out": step.grad, "input": step.input("input"), "weight": step.maybe("weight"),
        "running_mean": step.maybe("running_mean"), "running_var": step.maybe("running_var"),
        "save_mean": step.output(1), "save_invstd": step.output(2),
    }  # fmt: skip
    attributes: dict[str, Attribute] = {"train": training, "eps": step.get("eps", 1e-5)}
    return _masked(step, "native_batch_norm_backward", inputs, attributes, ("input", "weight", "bias"))


@reverse("cudnn_batch_norm")
def _cudnn_batch_norm(step: Step) -> Pulled:
    inputs = {
        "input": step.input("input"), "grad_output": step.grad, "weight": step.input("weight"),
        "running_mean": step.maybe("running_mean"), "running_var": step.maybe("running_var"),
        "save_mean": step.output(1), "save_var": step.output(2), "reserveSpace": step.output(3),
    }  # fmt: skip
    names = ("input", "weight", "bias")
    outputs = [tensor_type(step.input(name).type.shape, step.input(name).type.dtype) for name in names]
    made = step.nodes.apply("cudnn_batch_norm_backward", inputs, step.kept("epsilon"), outputs=outputs)
    return {name: made.value(index) for index, name in enumerate(names)}


@reverse("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss(step: Step) -> Pulled:
    inputs = {
        "grad_output": step.grad, "self": step.input("self"), "target": step.input("target"),
        "weight": step.maybe("weight"), "total_weight": step.output(1),
    }  # fmt: skip
    op = "nll_loss2d_backward" if "2d" in step.node.op else "nll_loss_backward"
    attributes: dict[str, Attribute] = {
        "reduction": step.get("reduction", 1),
        "ignore_index": step.get("ignore_index", -100),
    }
    made = step.nodes.apply(op, inputs, attributes, outputs=[like(step.input("self").type)])
    return {"self": made.value()}


@reverse("mse_loss", "smooth_l1_loss", "huber_loss")
def _distance(step: Step) -> Pulled:
    """Symmetric in input and target, up to the sign."""
    nodes, op = step.nodes, f"{step.node.op}_backward"
    attributes: dict[str, Attribute] = {"reduction": step.get("reduction", 1)}
    if step.node.op != "mse_loss":
        name = "beta" if step.node.op == "smooth_l1_loss" else "delta"
        attributes[name] = step.get(name, 1.0)
    x, target = step.input("self"), step.input("target")
    pulled: dict[str, Value] = {}
    for name, first, second in (("self", x, target), ("target", target, x)):
        if step.needs(name):
            inputs = {"grad_output": step.grad, "self": first, "target": second}
            pulled[name] = nodes.apply(op, inputs, attributes, outputs=[like(first.type)]).value()
    return pulled


@reverse("binary_cross_entropy_with_logits")
def _cross_entropy_with_logits(step: Step) -> Pulled:
    """sigmoid(x) - target, spread over what was reduced; without weights."""
    if step.maybe("weight") is not None or step.maybe("pos_weight") is not None:
        raise NotImplementedError("weights")
    nodes, x = step.nodes, step.input("self")
    grad = step.grad
    if step.get("reduction", 1) == 1:
        grad = div(nodes, grad, x.type.elements)
    return {"self": mul(nodes, sub(nodes, unary(nodes, "sigmoid", x), step.input("target")), grad)}


@reverse("glu")
def _glu(step: Step) -> Pulled:
    inputs = {"grad_output": step.grad, "self": step.input("self")}
    attributes: dict[str, Attribute] = {"dim": step.get("dim", -1)}
    made = step.nodes.apply("glu_backward", inputs, attributes, outputs=[like(step.input("self").type)])
    return {"self": made.value()}


@reverse("_scaled_dot_product_flash_attention_for_cpu")
def _flash_for_cpu(step: Step) -> Pulled:
    inputs = {
        "grad_out": step.grad, "query": step.input("query"), "key": step.input("key"), "value": step.input("value"),
        "out": step.output(), "logsumexp": step.output(1), "attn_mask": step.maybe("attn_mask"),
    }  # fmt: skip
    attributes: dict[str, Attribute] = {
        "dropout_p": step.get("dropout_p", 0.0),
        "is_causal": step.get("is_causal", False),
    }
    attributes |= step.kept("scale")
    return _attention(step, inputs, attributes)


@reverse("_scaled_dot_product_efficient_attention")
def _efficient(step: Step) -> Pulled:
    inputs = {
        "grad_out_": step.grad, "query": step.input("query"), "key": step.input("key"), "value": step.input("value"),
        "attn_bias": step.maybe("attn_bias"), "out": step.output(), "logsumexp": step.output(1),
        "philox_seed": step.output(2), "philox_offset": step.output(3),
    }  # fmt: skip
    attributes: dict[str, Attribute] = {
        "dropout_p": step.get("dropout_p", 0.0),
        "grad_input_mask": (True, True, True, False),
    }
    return _attention(step, inputs, {**attributes, **step.kept("is_causal", "scale")})


def _attention(step: Step, inputs: dict[str, Value | None], attributes: dict[str, Attribute]) -> Pulled:
    names = ("query", "key", "value")
    outputs = [_tokens_first(step.input(name).type) for name in names]
    made = step.nodes.apply(f"{step.node.op}_backward", inputs, attributes, outputs=outputs)
    return {name: made.value(index) for index, name in enumerate(names)}


def _tokens_first(type: TensorType) -> TensorType:
    """(batch, heads, tokens, size), in memory with tokens before heads, as the kernels write it."""
    _, heads, tokens, size = type.shape
    return tensor_type(type.shape, type.dtype, (tokens * heads * size, size, heads * size, 1))
