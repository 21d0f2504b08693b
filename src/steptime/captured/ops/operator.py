"""The row of an operator: all that is known of it, said once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from steptime.captured.graph import Attribute, Node, TensorType
from steptime.captured.ops.labels import OperatorDims
from steptime.captured.ops.work import OperatorWork, Work
from steptime.num import Num

Family = Literal[
    "product", "attention", "convolution", "recurrent", "norm", "optimiser", "map", "move", "view", "source"
]
Layouts = Literal[
    "recorded", "pointwise", "view", "copy", "images", "kernel", "matrix", "rows", "joined", "reduction", "heads"
]
"""Recorded: inputs and results as they were recorded, as nothing else is known. Pointwise: all in one order of dims.
View: one layout shows as another. Copy: left out where the layouts are equal. Images: NCHW or NHWC at the same cost.
Kernel: NCHW or NHWC, where the kernel works in one of them. Matrix: rows or columns. Rows: row-major, else a copy.
Joined: parts and result in one order. Reduction: any order, kept by the dims that stay. Heads: the last dim dense."""

Dims = Callable[[Node], OperatorDims]
Pieces = Callable[[Node, tuple[TensorType, ...], tuple[TensorType, ...]], Mapping[str, Attribute]]
"""Attributes of what one device runs, from the node and the pieces of its inputs and outputs."""
Measured = Callable[[Node, Work], tuple[str, Mapping[str, Num]] | None]
"""What a node is timed as on a processor, and the sizes of that; None where nothing like it was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator, or several that differ in their names alone."""

    names: str
    """A word each: as in ATen, without the underscore of in-place forms, or ``namespace::name`` of another library."""
    family: Family
    work: OperatorWork | None = None
    """What it computes and moves, and which kernels time it; None: nothing."""
    dims: Dims | None = None
    """How its tensors' dims are labelled, from which shardings and cuts follow; None: every device runs it whole."""
    layouts: Layouts = "recorded"
    """Which layouts in memory it reads and writes."""
    pieces: Pieces | None = None
    """Attributes that change with the pieces of its tensors."""
    processor: Measured | None = None
    """What it is timed as where it was measured on a processor."""
    operations: int | None = None
    """Vector operations per element, of an element-wise operator of one result that a fused kernel can take in."""
    factors: tuple[str, str] | None = None
    """Arguments that a product multiplies, in their order; any other tensor is added."""
    looks: bool = False
    """Its (first) output is another look at the storage of its first input."""
