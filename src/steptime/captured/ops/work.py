"""Work of one operator of a graph: arithmetic, traffic, launches, and time models."""

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
    """One use of a time model: an operator of a strategy table, or a curve, with its sizes."""

    operator: str
    shape: Shape
    backward: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of one operator, independent of the device."""

    matrix_flops: Num = 0.0
    """Operations on the matrix units (2mnk for a product), without pairs that a causal mask masks."""
    repeated_flops: Num = 0.0
    """Part of ``matrix_flops`` that repeats an earlier product: the scores in the backward of fused attention."""
    vector_flops: Num = 0.0
    moved_bytes: Num = 0.0
    launches: Num = 0.0
    kernels: tuple[KernelCall, ...] = ()
    dtype: str = "fp32"
    """Element type of the computation."""
    family: str = ""
    """Family of the operator; ``view`` if it costs nothing, ``unknown`` if no table has it."""

    @property
    def model_flops(self) -> Num:
        """Matrix operations that MFU counts: all without the repeated ones."""
        return self.matrix_flops - self.repeated_flops


STREAM: Final = "move"
"""Operator of a strategy table whose time model times a stream of bytes."""
STREAMED = Formula(streamed_bytes)
"""Traffic that reads every input once and writes every output once."""


Kernels = Callable[[Node, Shape], tuple[KernelCall, ...]]
"""The time models of a node, from its sizes."""


def _one(shape: Shape) -> Num:
    return 1.0


def _no_sizes(node: Node) -> dict[str, Num]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorWork:
    """Work of an operator as formulas over sizes, and the function that reads these sizes from a node."""

    sizes: Callable[[Node], Mapping[str, Num]] = _no_sizes
    """Sizes beyond those of :func:`basic`."""
    matrix_flops: Count | None = None
    repeated_flops: Count | None = None
    vector_flops: Count | None = None
    moved_bytes: Count = STREAMED
    launches: Count = _one
    kernels: Kernels


def stored_elements(type: TensorType) -> int:
    """Elements in memory; a dim of stride 0 counts as one element.

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
    """Sizes that every node has; an input that occurs twice is read once."""
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
    """Kernels of a node that is timed as one operator of the strategy tables, with the sizes of the row."""
    return lambda node, shape: (KernelCall(operator=operator, shape=shape, backward=backward),)


def moved(node: Node, shape: Shape) -> tuple[KernelCall, ...]:
    """Kernel of a node that is timed as a stream of the bytes that it moves."""
    return (KernelCall(operator=STREAM, shape={"read_bytes": shape["moved_bytes"], "written_bytes": 0.0}),)


def looped(node: Node, shape: Shape, operator: str, loops: Num, steps: Num) -> tuple[KernelCall, ...]:
    """Kernel of a node that is timed as loops with `steps` in total, or by traffic where loops were not measured."""
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
    """Work of a node by the formulas of its row."""
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
    """Bytes of all elements of the inputs, each distinct input once, and of the outputs."""
    read = sum(value.type.size_bytes for value in dict.fromkeys(node.inputs))
    return float(read), float(sum(output.size_bytes for output in node.outputs))


def variant(node: Node) -> str:
    """Name of an operator with marks for what changes its memory: ``.transposed``, or ``.expanded`` for an input."""
    marks = [".transposed"] if node.attribute("transposed") else []
    for value in node.inputs:
        strides = value.type.strides or ()
        if value.type.elements > 1 and any(
            not step and size > 1 for step, size in zip(strides, value.type.shape, strict=False)
        ):
            marks.append(".expanded")
            break
    return node.op + "".join(marks)
