"""Operators as PyTorch runs them one by one on a processor: which measured operator each is timed as, and its sizes.

On a CPU the call, the allocation of the result, the shape of the loops and the arithmetic of each element decide, which
traffic does not tell: an exponential takes ten times as long as a product of two tensors of the same size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from steptime.captured.aten.views import is_contiguous, strides_of
from steptime.captured.cost.work import KernelCall, Work, input_type, integer, integers, stored_bytes
from steptime.captured.graph import Node, TensorType
from steptime.cost.attention import fused_attention_vector_flops
from steptime.cost.convolution import blocked_by_library
from steptime.estimate.measured import CPU_ATTENTION, CPU_CONVOLUTION, CPU_PRODUCT, CPU_PRODUCTS, CPU_UNFOLDED
from steptime.num import Num

Sizes = Mapping[str, Num]

#: What was measured -> operators of one tensor whose arithmetic it stands for.
ARITHMETIC: Final[Mapping[str, str]] = {
    "exp": "exp exp2 expm1",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "erf": "erf erfc",
    "silu": "silu mish softplus elu celu selu",
    "sqrt": "sqrt rsqrt reciprocal",
    "log": "log log2 log10 log1p",
    "sin": "sin cos",
}
_LIGHT: Final = """
add sub rsub mul div true_divide neg abs relu threshold clamp clamp_min clamp_max maximum minimum square leaky_relu
hardtanh hardswish hardsigmoid relu6 where masked_fill eq ne lt le gt ge sign
"""
LIGHT: Final = frozenset(_LIGHT.split())
"""Maps that take no longer than their traffic."""
EASY_POWERS: Final = (2.0, 3.0, 0.5, -0.5, -1.0, -2.0, 1.0)
"""Exponents for which PyTorch multiplies, divides or takes a root."""
REDUCED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("sum", "prod"), "row_sum"),
    "mean": "row_mean",
    **dict.fromkeys(("amax", "amin", "max", "min", "argmax", "argmin"), "row_max"),
}
COPIES: Final = frozenset({"clone", "contiguous", "copy", "_to_copy", "constant_pad_nd", "flip", "roll"})
_NAMED: Final = {op: kind for kind, names in ARITHMETIC.items() for op in names.split()}


def direct_call(node: Node, work: Work, working_bytes: float) -> KernelCall | None:
    """What a node is timed as on a processor that was measured operator by operator, None where nothing is like it.

    Args:
        node: the operator.
        work: its work on any device.
        working_bytes: what the step goes through before it comes back to the same tensors.
    """
    if not node.inputs or not node.outputs or any(type.dtype != "fp32" for type in node.outputs[:1]):
        return None
    family = _FAMILIES.get(work.family)
    found = None if family is None else family(node, work)
    if found is None:
        return None
    kind, sizes = found
    products = kind in (CPU_PRODUCT, CPU_PRODUCTS)
    return KernelCall(operator=kind, shape={**sizes, "working_bytes": working_bytes} if products else sizes)


def looped_sizes(node: Node, work: Work, loops: float) -> Sizes:
    """Sizes of an operator of ``loops`` loops over all its elements."""
    result = max(stored_bytes(type) for type in node.outputs)
    steps = max([value.type.elements for value in node.inputs] + [node.outputs[0].elements])
    return {"loops": loops, "steps": steps, "moved_bytes": work.moved_bytes, "result_bytes": result}


def _map(node: Node, work: Work) -> tuple[str, Sizes] | None:
    out = node.outputs[0]
    if node.op in REDUCED:
        return _reduced(node, work)
    if node.op in LIGHT or (node.op == "pow" and _exponent(node) in EASY_POWERS):
        kind, rows = operands(node)
    elif node.op == "gelu":
        kind, rows = "gelu" if node.attribute("approximate", "none") == "none" else "gelu_tanh", 0.0
    elif node.op == "pow":
        kind, rows = "power", 0.0
    elif node.op in _NAMED:
        kind, rows = _NAMED[node.op], 0.0
    else:
        return None
    return f"cpu_{kind}", looped_sizes(node, work, rows if out.elements else 0.0)


def _exponent(node: Node) -> float | None:
    given = node.attribute("exponent")
    return float(given) if isinstance(given, (int, float)) else None


def operands(node: Node) -> tuple[str, float]:
    """How the operands of a light map lie, and the rows that it goes through where they differ.

    ``two`` whole tensors, ``one``, or one and a ``number``, a ``row`` or a ``column`` that is spread over it.
    """
    out = node.outputs[0]
    rows = out.elements / max(out.shape[-1], 1) if out.shape else 1.0
    parts = [value.type for value in node.inputs if value.type.elements != out.elements]
    if not parts:
        two = len(node.inputs) > 1
        alone = node.op in ("relu", "neg", "abs", "square", "sign") or two
        return ("two" if two else "one" if alone else "number"), 0.0
    part = max(parts, key=lambda type: type.elements)
    if part.elements == 1:
        return "number", 0.0
    return ("column" if part.shape and part.shape[-1] == 1 else "row"), rows


def _reduced(node: Node, work: Work) -> tuple[str, Sizes] | None:
    """Reductions along the last dims of a contiguous tensor; others go through memory another way."""
    x = node.inputs[0].type
    dims = {dim % max(x.rank, 1) for dim in (integers(node, "dim") or range(x.rank))}
    if not dims or dims != set(range(x.rank - len(dims), x.rank)) or not is_contiguous(x):
        return None
    width = math.prod(x.shape[dim] for dim in dims)
    return f"cpu_{REDUCED[node.op]}", looped_sizes(node, work, x.elements / max(width, 1))


def _norm(node: Node, work: Work) -> tuple[str, Sizes] | None:
    x = input_type(node, "input", "self")
    if "softmax" in node.op and not node.op.endswith("backward_data"):
        if integer(node, "dim", -1) % max(x.rank, 1) != x.rank - 1 or node.op == "_log_softmax":
            return None
        return "cpu_row_softmax", looped_sizes(node, work, x.elements / max(x.shape[-1], 1))
    if node.op in ("native_layer_norm", "layer_norm"):
        width = math.prod(integers(node, "normalized_shape")) or x.shape[-1]
        return "cpu_row_norm", looped_sizes(node, work, x.elements / max(width, 1))
    trains = bool(integer(node, "training", integer(node, "train", 0)))
    if "batch_norm" in node.op and "backward" not in node.op and not trains and x.rank > 2:
        return "cpu_plane_norm", looped_sizes(node, work, float(x.shape[0] * x.shape[1]))
    return None


def _move(node: Node, work: Work) -> tuple[str, Sizes] | None:
    x = node.inputs[0].type
    if node.op in ("cat", "stack"):
        return "cpu_copy_joined", looped_sizes(node, work, float(len(node.inputs)))
    if node.op not in COPIES:
        return None
    source = node.input("src") or node.inputs[0]
    alike = source.type.shape != node.outputs[0].shape or _same_order(source.type, node.outputs[0])
    rows = x.elements / max(x.shape[-1], 1) if x.shape else 1.0
    return f"cpu_copy_{'whole' if alike else 'turned'}", looped_sizes(node, work, 0.0 if alike else rows)


def _same_order(one: TensorType, other: TensorType) -> bool:
    """Whether the last dim of more than one element is the one that lies together in both."""
    fastest = [min((stride, -dim) for dim, stride in enumerate(strides_of(type)) if type.shape[dim] > 1)[1]
               if type.elements > 1 else 0 for type in (one, other)]  # fmt: skip
    return fastest[0] == fastest[1]


def _product(node: Node, work: Work) -> tuple[str, Sizes] | None:
    """One product, or a batch of equal ones; the bias of ``addmm`` is spread over the result first."""
    if len(work.kernels) != 1 or not work.matrix_flops:
        return None
    s = work.kernels[0].shape
    if "m" not in s:
        return None
    groups = s.get("groups", 1)
    biased = node.op.startswith(("add", "badd")) or node.input("bias") is not None
    sizes: Sizes = {
        "m": s["m"] / groups, "n": s["n"], "k": s["k"], "groups": groups, "biased": float(biased),
        "moved_bytes": work.moved_bytes,
    }  # fmt: skip
    return (CPU_PRODUCTS if "groups" in s else CPU_PRODUCT), sizes


def _attention(node: Node, work: Work) -> tuple[str, Sizes] | None:
    """Without a causal mask the processor does all pairs; its exponentials count as vector operations."""
    if node.op.endswith("_backward") or len(work.kernels) != 1:
        return None
    s = work.kernels[0].shape
    vector = fused_attention_vector_flops(s["pairs"], s["rows"], 0)
    sizes = {"matrix_flops": work.matrix_flops, "vector_flops": vector, "moved_bytes": work.moved_bytes}
    return CPU_ATTENTION, sizes


def _convolution(node: Node, work: Work) -> tuple[str, Sizes] | None:
    """By the library, or unfolded: each tap of each pixel is copied once, then it is a product."""
    if len(work.kernels) != 1 or "rows" not in work.kernels[0].shape or "backward" in node.op:
        return None
    sizes, x, weight = work.kernels[0].shape, input_type(node, "input", "self"), input_type(node, "weight")
    groups, kernel = integer(node, "groups", 1), weight.shape[-1]
    plain = all(step == 1 for name in ("stride", "dilation") for step in integers(node, name))
    if groups > 1 or blocked_by_library(x.shape[0], x.elements, kernel, groups, plain):
        return CPU_CONVOLUTION, sizes
    unfolded = sizes["rows"] * sizes["depth"] * (math.prod(weight.shape[2:]) > 1)
    moved = sizes["tensor_bytes"]
    return CPU_UNFOLDED, {"matrix_flops": work.matrix_flops, "vector_flops": unfolded, "moved_bytes": moved}


_FAMILIES: Final[Mapping[str, Callable[[Node, Work], tuple[str, Sizes] | None]]] = {
    "map": _map, "norm": _norm, "move": _move, "product": _product, "attention": _attention,
    "convolution": _convolution,
}  # fmt: skip
