"""What one operator of a graph does: arithmetic, traffic, launches, and which time models know it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from steptime.captured.graph import FLOATS, Node, TensorType
from steptime.cost.memory_bound import streamed_bytes
from steptime.estimate.operators import Formula
from steptime.num import Num

Shape = Mapping[str, Num]
"""Sizes of a node by the argument names of the formulas in :mod:`steptime.cost`."""
Count = Callable[[Shape], Num]
"""A formula over a shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """One use of a time model: the operator of a strategy table, or the curve, that it is timed as."""

    operator: str
    shape: Shape
    backward: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one operator costs on any device."""

    matrix_flops: Num = 0.0
    """Operations on the matrix units (2mnk for a product) of kernels that skip what a causal mask hides."""
    repeated_flops: Num = 0.0
    """Part of ``matrix_flops`` that repeats an earlier product: the scores in the backward of fused attention."""
    vector_flops: Num = 0.0
    moved_bytes: Num = 0.0
    launches: Num = 0.0
    kernels: tuple[KernelCall, ...] = ()
    dtype: str = "fp32"
    """Element type that it computes in."""
    family: str = ""
    """Family of operators whose table has it; ``view`` for what costs nothing, ``unknown`` for what is in no table."""

    @property
    def model_flops(self) -> Num:
        """Matrix operations that the model asks for, without repeated ones: what MFU counts."""
        return self.matrix_flops - self.repeated_flops


STREAM: Final = "move"
"""Operator of a strategy table that a stream of bytes is timed as."""
STREAMED = Formula(streamed_bytes)
"""Every input read once and every output written once."""


Kernels = Callable[[Node, Shape], tuple[KernelCall, ...]]
"""The time models of a node, from its sizes."""


def _one(shape: Shape) -> Num:
    return 1.0


def _no_sizes(node: Node) -> dict[str, Num]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorWork:
    """What an operator does: how its sizes are read off a node, and formulas over them."""

    sizes: Callable[[Node], Mapping[str, Num]] = _no_sizes
    """Sizes beyond those of :func:`basic`."""
    matrix_flops: Count | None = None
    repeated_flops: Count | None = None
    vector_flops: Count | None = None
    moved_bytes: Count = STREAMED
    launches: Count = _one
    kernels: Kernels


def stored_elements(type: TensorType) -> int:
    """Elements in memory: those along a dim of stride 0 are one.

    >>> stored_elements(TensorType((4, 8), "fp32", (0, 1)))
    8
    """
    if type.strides is None or 0 not in type.strides:
        return type.elements
    out = 1
    for size, stride in zip(type.shape, type.strides, strict=True):
        out *= size if stride or not size else 1
    return out


def stored_bytes(type: TensorType) -> int:
    """Bytes in memory of a tensor, with :func:`stored_elements`."""
    return stored_elements(type) * type.element_bytes


def basic(node: Node, inplace: bool = False) -> dict[str, Num]:
    """Sizes that every node has; an input that is given twice is read once."""
    read = {value: stored_bytes(value.type) for value in node.inputs}
    first = node.outputs[0] if node.outputs else None
    return {
        "read_bytes": sum(read.values()),
        "written_bytes": sum(stored_bytes(output) for output in node.outputs),
        "elements": first.elements if first is not None else 0,
        "element_bytes": first.element_bytes if first is not None else 0,
        "inplace": float(inplace),
    }


def dtype_of(node: Node) -> str:
    """Element type of the first floating-point input, else output; ``fp32`` where there is none."""
    types = [value.type for value in node.inputs] + list(node.outputs)
    return next((type.dtype for type in types if type.dtype in FLOATS), "fp32")


def as_operator(operator: str, *, backward: bool = False) -> Kernels:
    """Timed as one operator of the strategy tables, with the sizes of the row."""
    return lambda node, shape: (KernelCall(operator=operator, shape=shape, backward=backward),)


def moved(node: Node, shape: Shape) -> tuple[KernelCall, ...]:
    """Timed as a stream of as many bytes as the row moves."""
    return (KernelCall(operator=STREAM, shape={"read_bytes": shape["moved_bytes"], "written_bytes": 0.0}),)


def looped(node: Node, shape: Shape, operator: str, loops: Num, steps: Num) -> tuple[KernelCall, ...]:
    """Timed as loops with a number of steps in all where that was measured, else as what the row moves."""
    result = max((stored_bytes(output) for output in node.outputs), default=0)
    sizes = {"moved_bytes": shape["moved_bytes"], "result_bytes": result, "loops": loops, "steps": steps}
    return (KernelCall(operator=operator, shape=sizes),)


def integers(node: Node, name: str) -> tuple[int, ...]:
    """An attribute that is a list of integers, or one integer; empty without it."""
    given = node.attribute(name)
    if isinstance(given, tuple):
        return tuple(int(item) for item in given if isinstance(item, (bool, int)))
    return (int(given),) if isinstance(given, (bool, int)) else ()


def integer(node: Node, name: str, default: int) -> int:
    """An attribute that is one integer or a truth value."""
    found = integers(node, name)
    return found[0] if found else default


def input_type(node: Node, *names: str) -> TensorType:
    """Type of the first input that has one of the names, else of the first input."""
    for name in names:
        value = node.input(name)
        if value is not None:
            return value.type
    return node.inputs[0].type


def evaluate(row: OperatorWork, node: Node, family: str, inplace: bool) -> Work:
    """The formulas of a row over the sizes of a node."""
    shape: dict[str, Num] = {**basic(node, inplace), **row.sizes(node)}
    counts = {
        name: formula(shape) if formula is not None else 0
        for name, formula in (
            ("matrix_flops", row.matrix_flops), ("repeated_flops", row.repeated_flops),
            ("vector_flops", row.vector_flops), ("moved_bytes", row.moved_bytes), ("launches", row.launches),
        )
    }  # fmt: skip
    kernels = row.kernels(node, {**shape, **counts})
    return Work(**counts, kernels=kernels, dtype=dtype_of(node), family=family)


def whole_bytes(node: Node) -> tuple[float, float]:
    """Bytes of all elements of its inputs, one that is given twice counted once, and of its outputs."""
    read = sum(value.type.size_bytes for value in dict.fromkeys(node.inputs))
    return float(read), float(sum(output.size_bytes for output in node.outputs))


def variant(node: Node) -> str:
    """Name of an operator with what changes the memory that it takes: transposed, of an input that is expanded."""
    marks = [".transposed"] if node.attribute("transposed") else []
    for value in node.inputs:
        strides = value.type.strides or ()
        if value.type.elements > 1 and any(
            not step and size > 1 for step, size in zip(strides, value.type.shape, strict=False)
        ):
            marks.append(".expanded")
            break
    return node.op + "".join(marks)
