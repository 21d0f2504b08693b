"""Constructors of nodes; output types come from PyTorch, which runs the operator on fake tensors.

Each function has the name of its ATen operator. All raise ``ValueError`` where the arguments do not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from steptime.captured import torch_parts as parts
from steptime.captured.graph import Attribute, Node, Nodes, TensorType, Value
from steptime.captured.graph.strides import strides_of, tensor_type, view_strides, wrap
from steptime.captured.ops.calls import call_of
from steptime.captured.record.values import TORCH_DTYPES, tensors_in, type_of

Operand = Value | float | int | bool
"""A tensor or a number."""
_TYPES: dict[tuple[object, ...], tuple[TensorType, ...]] = {}
_FAKES = parts.FakeTensorMode()


def made(
    nodes: Nodes,
    op: str,
    inputs: Mapping[str, Value | Sequence[Value] | None],
    attributes: Mapping[str, Attribute] | None = None,
) -> Node:
    """A node whose outputs have the types, with strides, that PyTorch computes.

    Args:
        nodes: the table of nodes.
        op: the operator.
        inputs: values by argument name; a list of values is one argument, None an argument that is not given.
        attributes: all other arguments.

    Raises:
        ValueError: PyTorch does not take these arguments.
    """
    probe = Nodes().apply(op, inputs, attributes, outputs=())
    return nodes.node(op, probe.inputs, probe.names, probe.attributes, types_of(probe))


def types_of(node: Node) -> tuple[TensorType, ...]:
    """Output types that PyTorch computes for an operator and its inputs; types recorded in the node are ignored.

    Raises:
        ValueError: PyTorch does not take these arguments.
    """
    key = (node.op, node.names, tuple(value.type for value in node.inputs), node.attributes)
    found = _TYPES.get(key)
    if found is None:
        found = _TYPES[key] = _types(node)
    return found


def _types(node: Node) -> tuple[TensorType, ...]:
    call = call_of(node)
    with _FAKES, torch.no_grad():

        def fake(given: Any) -> Any:
            if isinstance(given, Value):
                type = given.type
                return torch.empty_strided(type.shape, strides_of(type), dtype=TORCH_DTYPES[type.dtype])
            return [fake(item) for item in given] if isinstance(given, list) else given

        try:
            output = call.function(*map(fake, call.arguments), **{name: fake(x) for name, x in call.keywords.items()})
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"{node.op}: {str(error).splitlines()[0]}") from None
        return tuple(map(type_of, tensors_in(output)))


def pointwise(nodes: Nodes, op: str, operands: Mapping[str, Operand], **attributes: Attribute) -> Value:
    """An element-wise operator on named tensors and numbers."""
    tensors = {name: operand for name, operand in operands.items() if isinstance(operand, Value)}
    numbers: dict[str, Attribute] = {name: o for name, o in operands.items() if not isinstance(o, Value)}
    return made(nodes, op, tensors, numbers | attributes).value()


def unary(nodes: Nodes, op: str, x: Value, **attributes: Attribute) -> Value:
    """An element-wise operator on one tensor, its other arguments as attributes."""
    return made(nodes, op, {"self": x}, attributes).value()


def binary(nodes: Nodes, op: str, a: Value, b: Operand, **attributes: Attribute) -> Value:
    """An element-wise operator on a tensor and a tensor or number."""
    return pointwise(nodes, op, {"self": a, "other": b}, **attributes)


def add(nodes: Nodes, a: Value, b: Operand) -> Value:
    """a + b."""
    return binary(nodes, "add", a, b)


def sub(nodes: Nodes, a: Value, b: Operand) -> Value:
    """a - b."""
    return binary(nodes, "sub", a, b)


def mul(nodes: Nodes, a: Value, b: Operand) -> Value:
    """a b."""
    return binary(nodes, "mul", a, b)


def to(nodes: Nodes, x: Value, dtype: str) -> Value:
    """The tensor in another element type; unchanged if it has that type."""
    return x if x.type.dtype == dtype else unary(nodes, "_to_copy", x, dtype=dtype)


def reduce(nodes: Nodes, op: str, x: Value, dims: Sequence[int], keepdim: bool, **more: Attribute) -> Value:
    """``sum``, ``mean``, ``amax``, ``amin`` over dims."""
    over = tuple(sorted(wrap(dim, x.type.rank) for dim in dims)) if x.type.rank else ()
    return unary(nodes, op, x, dim=over, keepdim=keepdim, **more)


def mm(nodes: Nodes, a: Value, b: Value, added: Value | None = None) -> Value:
    """Product of two matrices (m, k) and (k, n), plus an optional addend."""
    if added is None:
        return made(nodes, "mm", {"self": a, "mat2": b}).value()
    return made(nodes, "addmm", {"self": added, "mat1": a, "mat2": b}).value()


def bmm(nodes: Nodes, a: Value, b: Value) -> Value:
    """Products of a batch of matrices, (b, m, k) and (b, k, n)."""
    return made(nodes, "bmm", {"self": a, "mat2": b}).value()


def clone(nodes: Nodes, x: Value) -> Value:
    """A contiguous copy."""
    return unary(nodes, "clone", x, memory_format="torch.contiguous_format")


def reshape(nodes: Nodes, x: Value, shape: Sequence[int]) -> Value:
    """``view`` where the strides allow it, else ``clone`` and ``_unsafe_view``, as PyTorch does."""
    shape = tuple(int(size) for size in shape)
    if shape == x.type.shape:
        return x
    strides = view_strides(x.type, shape)
    op = "view" if strides is not None else "_unsafe_view"
    source = x if strides is not None else clone(nodes, x)
    output = tensor_type(shape, x.type.dtype, strides)
    return nodes.apply(op, {"self": source}, {"size": shape}, outputs=[output]).value()


def permute(nodes: Nodes, x: Value, dims: Sequence[int]) -> Value:
    """Dims in another order; the tensor itself if the order is unchanged."""
    order = tuple(wrap(dim, x.type.rank) for dim in dims)
    return x if order == tuple(range(x.type.rank)) else unary(nodes, "permute", x, dims=order)


def transpose(nodes: Nodes, x: Value, dim0: int, dim1: int) -> Value:
    """Two dims exchanged."""
    return unary(nodes, "transpose", x, dim0=dim0, dim1=dim1)


def t(nodes: Nodes, x: Value) -> Value:
    """A matrix transposed; the transpose of a transpose is the matrix itself."""
    return x.node.inputs[0] if x.node.op == "t" else unary(nodes, "t", x)


def expand(nodes: Nodes, x: Value, shape: Sequence[int]) -> Value:
    """Dims of size 1 broadcast to larger sizes, and new dims in front, all with stride zero."""
    size = tuple(int(each) for each in shape)
    return x if size == x.type.shape else unary(nodes, "expand", x, size=size)


def slice(nodes: Nodes, x: Value, dim: int, start: int, end: int, step: int = 1) -> Value:
    """Elements ``start, start + step, ...`` below ``end`` of one dim; the tensor itself if these are all elements."""
    dim = wrap(dim, x.type.rank)
    size = x.type.shape[dim]
    start, end = (min(max(bound + size if bound < 0 else bound, 0), size) for bound in (start, end))
    whole = (start, max(start, end), step) == (0, size, 1)
    return x if whole else unary(nodes, "slice", x, dim=dim, start=start, end=max(start, end), step=step)


def select(nodes: Nodes, x: Value, dim: int, index: int) -> Value:
    """One index of one dim, which is removed."""
    return unary(nodes, "select", x, dim=wrap(dim, x.type.rank), index=index)


def unsqueeze(nodes: Nodes, x: Value, dim: int) -> Value:
    """A new dim of size 1."""
    return unary(nodes, "unsqueeze", x, dim=wrap(dim, x.type.rank + 1))


def squeeze(nodes: Nodes, x: Value, dims: Sequence[int]) -> Value:
    """The given dims removed where their size is 1; the tensor itself if none has size 1."""
    gone = tuple(sorted({wrap(dim, x.type.rank) for dim in dims} if x.type.rank else ()))
    return unary(nodes, "squeeze", x, dim=gone) if any(x.type.shape[dim] == 1 for dim in gone) else x


def cat(nodes: Nodes, parts: Sequence[Value], dim: int) -> Value:
    """Concatenation of tensors along one dim."""
    return made(nodes, "cat", {"tensors": parts}, {"dim": wrap(dim, parts[0].type.rank)}).value()


def spatial(values: Sequence[int], rank: int) -> tuple[int, ...]:
    """One number per spatial dim; a single number applies to all.

    >>> spatial((3,), 2)
    (3, 3)
    """
    given = tuple(int(v) for v in values)
    if len(given) not in (1, rank):
        raise ValueError(f"{rank} spatial dims need one number each, not {given}")
    return given * rank if len(given) == 1 else given


def convolution(nodes: Nodes, x: Value, weight: Value, bias: Value | None, **how: Any) -> Value:
    """Convolution of (n, c, ...) with weights (out, c / groups, ...); transposed: (c, out / groups, ...).

    Args:
        nodes: the table of nodes.
        x: images.
        weight: weights.
        bias: one number per output channel, or None.
        how: ``stride``, ``padding``, ``dilation``; ``transposed``, ``output_padding`` and ``groups`` have defaults.
    """
    rank = x.type.rank - 2
    each = {"output_padding": (0,), **how}
    attributes: dict[str, Attribute] = {
        **{name: spatial(each[name], rank) for name in ("stride", "padding", "dilation")},
        "transposed": each.get("transposed", False),
        "output_padding": spatial(each["output_padding"], rank),
        "groups": each.get("groups", 1),
    }
    return made(nodes, "convolution", {"input": x, "weight": weight, "bias": bias}, attributes).value()


def softmax(nodes: Nodes, x: Value, dim: int) -> Value:
    """``_softmax`` over one dim."""
    return unary(nodes, "_softmax", x, dim=wrap(dim, x.type.rank), half_to_float=False)


def rms_norm(nodes: Nodes, x: Value, weight: Value | None, shape: Sequence[int], eps: float) -> Value:
    """``_fused_rms_norm``: the input over the root of the mean of its squares."""
    attributes: dict[str, Attribute] = {"normalized_shape": tuple(shape), "eps": eps}
    return made(nodes, "_fused_rms_norm", {"input": x, "weight": weight}, attributes).value()


def attention(
    nodes: Nodes, query: Value, key: Value, value: Value, mask: Value | None, *, causal: bool, scale: float | None
) -> Value:
    """Fused attention on (batch, heads, tokens, head size), under the name of the kernel that a capture records."""
    attributes: dict[str, Attribute] = {"dropout_p": 0.0, "is_causal": causal}
    if scale is not None:
        attributes["scale"] = scale
    inputs = {"query": query, "key": key, "value": value, "attn_mask": mask}
    return made(nodes, "_scaled_dot_product_flash_attention_for_cpu", inputs, attributes).value()
