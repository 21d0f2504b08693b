"""Measured operator, with sizes, that each operator is timed as when PyTorch runs it on a CPU.

On a CPU the call, the allocation of the result, the loops and the arithmetic of each element determine the time;
traffic does not: an exponential takes ten times as long as a product of two tensors of the same size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from steptime.captured.graph import Node, TensorType
from steptime.captured.graph.strides import is_contiguous, strides_of
from steptime.captured.ops.work import Work, input_type, integer, integers, stored_bytes
from steptime.cost.attention import fused_attention_vector_flops
from steptime.cost.convolution import blocked_by_library
from steptime.estimate.measured import CPU_ATTENTION, CPU_CONVOLUTION, CPU_PRODUCT, CPU_PRODUCTS, CPU_UNFOLDED
from steptime.num import Num

Sizes = Mapping[str, Num]
Measured = Callable[[Node, Work], tuple[str, Sizes] | None]


EASY_POWERS: Final = (2.0, 3.0, 0.5, -0.5, -1.0, -2.0, 1.0)
"""Exponents for which PyTorch multiplies, divides or takes a root."""


def looped_sizes(node: Node, work: Work, loops: float) -> Sizes:
    """Sizes of an operator of ``loops`` loops over all its elements."""
    result = max(stored_bytes(type) for type in node.outputs)
    steps = max([value.type.elements for value in node.inputs] + [node.outputs[0].elements])
    return {"loops": loops, "steps": steps, "moved_bytes": work.moved_bytes, "result_bytes": result}


def arithmetic(kind: str) -> Measured:
    """A function of every element of one tensor, timed as measured."""
    return lambda node, work: (f"cpu_{kind}", looped_sizes(node, work, 0.0))


def gelu(node: Node, work: Work) -> tuple[str, Sizes]:
    """GELU by the error function, or by its approximation with a hyperbolic tangent."""
    kind = "gelu" if node.attribute("approximate", "none") == "none" else "gelu_tanh"
    return f"cpu_{kind}", looped_sizes(node, work, 0.0)


def light(node: Node, work: Work) -> tuple[str, Sizes]:
    """A map that takes no longer than its traffic; with a single tensor, the other operand is a number."""
    return _light(node, work, alone=len(node.inputs) > 1)


def light_alone(node: Node, work: Work) -> tuple[str, Sizes]:
    """A map of one tensor that takes no longer than its traffic."""
    return _light(node, work, alone=True)


def _light(node: Node, work: Work, *, alone: bool) -> tuple[str, Sizes]:
    kind, rows = operands(node, alone=alone)
    return f"cpu_{kind}", looped_sizes(node, work, rows if node.outputs[0].elements else 0.0)


def power(node: Node, work: Work) -> tuple[str, Sizes]:
    """A power; easy exponents are timed as a light map."""
    exponent = node.attribute("exponent")
    easy = isinstance(exponent, (int, float)) and exponent in EASY_POWERS
    return light(node, work) if easy else ("cpu_power", looped_sizes(node, work, 0.0))


def operands(node: Node, *, alone: bool) -> tuple[str, float]:
    """Kind of the operands of a light map, and the rows of its loop if their shapes differ.

    ``two`` whole tensors, ``one``, or one and a ``number``, a ``row`` or a ``column`` that is broadcast.

    Args:
        node: the map.
        alone: with a single tensor, the map has no number as its other operand.
    """
    out = node.outputs[0]
    rows = out.elements / max(out.shape[-1], 1) if out.shape else 1.0
    parts = [value.type for value in node.inputs if value.type.elements != out.elements]
    if not parts:
        return ("two" if len(node.inputs) > 1 else "one" if alone else "number"), 0.0
    part = max(parts, key=lambda type: type.elements)
    if part.elements == 1:
        return "number", 0.0
    return ("column" if part.shape and part.shape[-1] == 1 else "row"), rows


def reduced(kind: str) -> Measured:
    """A reduction along the last dims of a contiguous tensor; others traverse memory differently and have no time."""

    def timed(node: Node, work: Work) -> tuple[str, Sizes] | None:
        x = node.inputs[0].type
        dims = {dim % max(x.rank, 1) for dim in (integers(node, "dim") or range(x.rank))}
        if not dims or dims != set(range(x.rank - len(dims), x.rank)) or not is_contiguous(x):
            return None
        width = math.prod(x.shape[dim] for dim in dims)
        return f"cpu_row_{kind}", looped_sizes(node, work, x.elements / max(width, 1))

    return timed


def softmax(node: Node, work: Work) -> tuple[str, Sizes] | None:
    """A softmax along the last dim; others have no measured time."""
    x = input_type(node, "input", "self")
    if integer(node, "dim", -1) % max(x.rank, 1) != x.rank - 1:
        return None
    return "cpu_row_softmax", looped_sizes(node, work, x.elements / max(x.shape[-1], 1))


def layer_norm(node: Node, work: Work) -> tuple[str, Sizes]:
    """A layer norm: a loop for each row."""
    x = input_type(node, "input", "self")
    width = math.prod(integers(node, "normalized_shape")) or x.shape[-1]
    return "cpu_row_norm", looped_sizes(node, work, x.elements / max(width, 1))


def batch_norm(node: Node, work: Work) -> tuple[str, Sizes] | None:
    """A batch norm with given statistics: a loop for each channel of each image."""
    x = input_type(node, "input", "self")
    if integer(node, "training", integer(node, "train", 0)) or x.rank <= 2:
        return None
    return "cpu_plane_norm", looped_sizes(node, work, float(x.shape[0] * x.shape[1]))


def joined(node: Node, work: Work) -> tuple[str, Sizes]:
    """A concatenation: a copy of each member."""
    return "cpu_copy_joined", looped_sizes(node, work, float(len(node.inputs)))


def copied(node: Node, work: Work) -> tuple[str, Sizes]:
    """A copy in the memory order of its source, or in another one."""
    source, x = node.input("src") or node.inputs[0], node.inputs[0].type
    alike = source.type.shape != node.outputs[0].shape or _same_order(source.type, node.outputs[0])
    rows = x.elements / max(x.shape[-1], 1) if x.shape else 1.0
    return f"cpu_copy_{'whole' if alike else 'turned'}", looped_sizes(node, work, 0.0 if alike else rows)


def _same_order(one: TensorType, other: TensorType) -> bool:
    """True if both tensors have the same fastest dim: the one with the smallest stride and more than one element."""
    fastest = [min((stride, -dim) for dim, stride in enumerate(strides_of(type)) if type.shape[dim] > 1)[1]
               if type.elements > 1 else 0 for type in (one, other)]  # fmt: skip
    return fastest[0] == fastest[1]


def product(node: Node, work: Work) -> tuple[str, Sizes] | None:
    """One product, or a batch of equal ones; an addend is broadcast to the result first."""
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


def attention(node: Node, work: Work) -> tuple[str, Sizes] | None:
    """Fused attention: a CPU computes all pairs unless the mask is causal; exponentials count as vector operations."""
    if len(work.kernels) != 1:
        return None
    s = work.kernels[0].shape
    vector = fused_attention_vector_flops(s["pairs"], s["rows"], 0)
    sizes = {"matrix_flops": work.matrix_flops, "vector_flops": vector, "moved_bytes": work.moved_bytes}
    return CPU_ATTENTION, sizes


def convolution(node: Node, work: Work) -> tuple[str, Sizes] | None:
    """A convolution by the library, or unfolded: each tap of each pixel is copied, then multiplied as a matrix."""
    if len(work.kernels) != 1 or "rows" not in work.kernels[0].shape:
        return None
    sizes, x, weight = work.kernels[0].shape, input_type(node, "input", "self"), input_type(node, "weight")
    groups, kernel = integer(node, "groups", 1), weight.shape[-1]
    plain = all(step == 1 for name in ("stride", "dilation") for step in integers(node, name))
    if groups > 1 or blocked_by_library(x.shape[0], x.elements, kernel, groups, plain):
        return CPU_CONVOLUTION, sizes
    unfolded = sizes["rows"] * sizes["depth"] * (math.prod(weight.shape[2:]) > 1)
    moved = sizes["tensor_bytes"]
    return CPU_UNFOLDED, {"matrix_flops": work.matrix_flops, "vector_flops": unfolded, "moved_bytes": moved}
