"""Element-wise operators, reductions and matrix products: constructors that work out the types of the outputs.

Each is named as the ATen operator that it makes. All raise ``ValueError`` where the arguments do not fit each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from steptime.captured.aten.views import expand, fresh, like, reshape, tensor_type, unsqueeze, wrap
from steptime.captured.graph.program import Attribute, Nodes, TensorType, Value
from steptime.model.spec import FLOATS

Operand = Value | float | int | bool
"""A tensor or a number."""

#: Operators whose result is a truth value.
COMPARISONS: Final = frozenset({
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not", "isnan", "isinf",
})  # fmt: skip
#: Operators whose result is a float for integers too.
FLOATING: Final = frozenset({
    "div", "exp", "log", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tan", "tanh", "sigmoid", "erf", "mean",
    "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "log1p", "expm1",
})  # fmt: skip

_RANKS: Final = {
    "bool": 0, "uint8": 1, "int8": 2, "uint16": 3, "int16": 4, "uint32": 5, "int32": 6, "uint64": 7, "int64": 8,
    "fp8_e5m2": 9, "fp8": 10, "fp16": 11, "bf16": 12, "tf32": 13, "fp32": 14, "fp64": 15,
    "complex64": 16, "complex128": 17,
}  # fmt: skip


def promoted(a: str, b: str) -> str:
    """Element type of an operator on two element types.

    >>> promoted("int64", "bf16"), promoted("bf16", "fp16"), promoted("uint8", "int8")
    ('bf16', 'fp32', 'int16')
    """
    pair = {a, b}
    if pair == {"bf16", "fp16"}:
        return "fp32"
    if pair == {"uint8", "int8"}:
        return "int16"
    return max(a, b, key=_RANKS.__getitem__)


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of an element-wise operator on tensors of those shapes.

    >>> broadcast((4, 1, 3), (2, 3))
    (4, 2, 3)
    """
    rank = max((len(shape) for shape in shapes), default=0)
    result = [1] * rank
    for shape in shapes:
        for dim, size in enumerate(shape, rank - len(shape)):
            if size != 1 and result[dim] not in (1, size):
                raise ValueError(f"shapes {', '.join(map(str, shapes))} do not broadcast")
            result[dim] = size if size != 1 else result[dim]
    return tuple(result)


def result_type(op: str, operands: Sequence[Operand]) -> TensorType:
    """Type of an element-wise operator: broadcast shape, promoted element type, order of dims of the first full one."""
    tensors = [operand.type for operand in operands if isinstance(operand, Value)]
    shape = broadcast(*(type.shape for type in tensors))
    # A tensor of rank 0 decides the element type only where it is of a higher kind, as PyTorch has it.
    deciding = [type for type in tensors if type.rank] or tensors
    if all(type.dtype == "bool" for type in deciding):
        deciding = tensors
    dtype = deciding[0].dtype
    for type in deciding[1:]:
        dtype = promoted(dtype, type.dtype)
    floats = any(isinstance(o, float) and not isinstance(o, bool) for o in operands)
    floats |= any(type.dtype in FLOATS for type in tensors) or op in FLOATING
    if floats and dtype not in FLOATS and not dtype.startswith("complex"):
        dtype = next((type.dtype for type in tensors if type.dtype in FLOATS), "fp32")
    elif dtype == "bool" and any(isinstance(o, int) and not isinstance(o, bool) for o in operands):
        dtype = "int64"
    dtype = "bool" if op in COMPARISONS else dtype
    return fresh(shape, dtype, tensors)


def pointwise(
    nodes: Nodes, op: str, operands: dict[str, Operand], attributes: dict[str, Attribute] | None = None
) -> Value:
    """An element-wise operator on named tensors and numbers."""
    tensors = {name: operand for name, operand in operands.items() if isinstance(operand, Value)}
    numbers: dict[str, Attribute] = {name: o for name, o in operands.items() if not isinstance(o, Value)}
    whole = (attributes or {}).get("rounding_mode") is not None
    output = result_type("floor_divide" if whole else op, list(operands.values()))
    return nodes.apply(op, tensors, numbers | (attributes or {}), outputs=[output]).value()


def unary(nodes: Nodes, op: str, x: Value, **attributes: Attribute) -> Value:
    """An element-wise operator on one tensor, its other arguments as attributes."""
    return pointwise(nodes, op, {"self": x}, attributes)


def binary(nodes: Nodes, op: str, a: Value, b: Operand, **attributes: Attribute) -> Value:
    """An element-wise operator on a tensor and a tensor or number."""
    return pointwise(nodes, op, {"self": a, "other": b}, attributes)


def add(nodes: Nodes, a: Value, b: Operand) -> Value:
    """a + b."""
    return binary(nodes, "add", a, b)


def sub(nodes: Nodes, a: Value, b: Operand) -> Value:
    """a - b."""
    return binary(nodes, "sub", a, b)


def mul(nodes: Nodes, a: Value, b: Operand) -> Value:
    """a b."""
    return binary(nodes, "mul", a, b)


def div(nodes: Nodes, a: Value, b: Operand) -> Value:
    """a / b."""
    return binary(nodes, "div", a, b)


def power(nodes: Nodes, a: Value, exponent: Operand) -> Value:
    """a to the power of a tensor or number."""
    return pointwise(nodes, "pow", {"self": a, "exponent": exponent})


def where(nodes: Nodes, condition: Value, a: Value, b: Value) -> Value:
    """``a`` where the condition holds, else ``b``."""
    shape = broadcast(condition.type.shape, a.type.shape, b.type.shape)
    output = fresh(shape, result_type("where", [a, b]).dtype, [condition.type, a.type, b.type])
    return nodes.apply("where", {"condition": condition, "self": a, "other": b}, outputs=[output]).value()


def to(nodes: Nodes, x: Value, dtype: str) -> Value:
    """The tensor in another element type; itself where it has it."""
    if x.type.dtype == dtype:
        return x
    return nodes.apply("_to_copy", {"self": x}, {"dtype": dtype}, outputs=[like(x.type, dtype)]).value()


def full(nodes: Nodes, shape: Sequence[int], value: float, dtype: str) -> Value:
    """A tensor of one number."""
    op = "zeros" if value == 0 else "ones" if value == 1 else "full"
    given: dict[str, Attribute] = {"fill_value": value} if op == "full" else {}
    attributes: dict[str, Attribute] = {"size": tuple(shape), **given, "dtype": dtype}
    return nodes.apply(op, {}, attributes, outputs=[tensor_type(shape, dtype)]).value()


def reduced_shape(shape: Sequence[int], dims: Sequence[int], keepdim: bool) -> tuple[int, ...]:
    """Shape after a reduction over those dims.

    >>> reduced_shape((2, 3, 4), (-1,), True)
    (2, 3, 1)
    """
    gone = {wrap(dim, len(shape)) for dim in dims}
    return tuple(1 if d in gone else size for d, size in enumerate(shape) if keepdim or d not in gone)


def reduce(nodes: Nodes, op: str, x: Value, dims: Sequence[int], keepdim: bool, **more: Attribute) -> Value:
    """``sum``, ``mean``, ``amax``, ``amin`` over dims."""
    dims = tuple(sorted(wrap(dim, x.type.rank) for dim in dims)) if x.type.rank else ()
    dtype = x.type.dtype
    if op == "sum" and dtype not in FLOATS:
        dtype = "int64"
    shape = reduced_shape(x.type.shape, dims, keepdim)
    attributes: dict[str, Attribute] = {"dim": dims, "keepdim": keepdim, **more}
    return nodes.apply(op, {"self": x}, attributes, outputs=[tensor_type(shape, dtype)]).value()


def broadcast_dims(to: Sequence[int], shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Dims that a broadcast of ``shape`` to a longer or wider one adds in front, and those that it widens from 1.

    >>> broadcast_dims((4, 2, 3), (1, 3))
    ((0,), (1,))
    """
    added = len(to) - len(shape)
    widened = tuple(d + added for d, size in enumerate(shape) if size == 1 and to[d + added] != 1)
    return tuple(range(added)), widened


def sum_to(nodes: Nodes, x: Value, shape: tuple[int, ...]) -> Value:
    """Sum over what a broadcast from ``shape`` has added: its gradient."""
    leading, kept = broadcast_dims(x.type.shape, shape)
    if kept:
        x = reduce(nodes, "sum", x, leading + kept, True)
        if leading:
            x = reshape(nodes, x, shape)
    elif leading:
        x = reduce(nodes, "sum", x, leading, False)
    return x


def spread(nodes: Nodes, x: Value, shape: tuple[int, ...], dims: Sequence[int], keepdim: bool) -> Value:
    """A reduced tensor shown again in the shape that it was reduced from."""
    if not keepdim:
        for dim in sorted(wrap(d, len(shape)) for d in dims):
            x = unsqueeze(nodes, x, dim)
    return expand(nodes, x, shape)


def mm(nodes: Nodes, a: Value, b: Value) -> Value:
    """Product of two matrices (m, k) and (k, n)."""
    m, k = _matrix(a)
    inner, n = _matrix(b)
    if k != inner:
        raise ValueError(f"{a.type} and {b.type} cannot be multiplied")
    output = TensorType((m, n), promoted(a.type.dtype, b.type.dtype))
    return nodes.apply("mm", {"self": a, "mat2": b}, outputs=[output]).value()


def addmm(nodes: Nodes, bias: Value, a: Value, b: Value, beta: float = 1, alpha: float = 1) -> Value:
    """beta bias + alpha a b."""
    m, k = _matrix(a)
    inner, n = _matrix(b)
    if k != inner or broadcast(bias.type.shape, (m, n)) != (m, n):
        raise ValueError(f"{bias.type} + {a.type} {b.type} cannot be computed")
    attributes: dict[str, Attribute] = {} if beta == alpha == 1 else {"beta": beta, "alpha": alpha}
    output = TensorType((m, n), promoted(a.type.dtype, b.type.dtype))
    return nodes.apply("addmm", {"self": bias, "mat1": a, "mat2": b}, attributes, outputs=[output]).value()


def bmm(nodes: Nodes, a: Value, b: Value) -> Value:
    """Products of a batch of matrices, (b, m, k) and (b, k, n)."""
    if a.type.rank != 3 or b.type.rank != 3:
        raise ValueError(f"bmm takes batches of matrices, not {a.type} and {b.type}")
    (batch, m, k), (other, inner, n) = a.type.shape, b.type.shape
    if batch != other or k != inner:
        raise ValueError(f"{a.type} and {b.type} cannot be multiplied")
    output = TensorType((batch, m, n), promoted(a.type.dtype, b.type.dtype))
    return nodes.apply("bmm", {"self": a, "mat2": b}, outputs=[output]).value()


def dot(nodes: Nodes, a: Value, b: Value) -> Value:
    """Product of two vectors, a scalar."""
    if a.type.rank != 1 or a.type.shape != b.type.shape:
        raise ValueError(f"{a.type} and {b.type} cannot be multiplied")
    output = TensorType((), promoted(a.type.dtype, b.type.dtype))
    return nodes.apply("dot", {"self": a, "tensor": b}, outputs=[output]).value()


def _matrix(x: Value) -> tuple[int, int]:
    if x.type.rank != 2:
        raise ValueError(f"a matrix is needed, not {x.type}")
    return x.type.shape[0], x.type.shape[1]
