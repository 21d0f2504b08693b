"""The row of an operator: its dims, work, kernels and layouts."""

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
"""Recorded: inputs and results as recorded, since no other layout is known. Pointwise: all in one order of dims.

View: maps one layout to another. Copy: dropped if both layouts are equal. Images: NCHW or NHWC at the same cost.
Kernel: NCHW or NHWC, with a kernel that works in one of them. Matrix: row-major or column-major. Rows: row-major, else
a copy. Joined: parts and result in one order. Reduction: any order of the kept dims. Heads: last dim contiguous."""

Dims = Callable[[Node], OperatorDims]
Pieces = Callable[[Node, tuple[TensorType, ...], tuple[TensorType, ...]], Mapping[str, Attribute]]
"""Attributes of the operator that one device runs, from the node and the pieces of its inputs and outputs."""
Measured = Callable[[Node, Work], tuple[str, Mapping[str, Num]] | None]
"""Name and sizes of the measured operator that a node is timed as on a CPU; None where none was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator, or several that differ only in their names."""

    names: str
    """Names, separated by spaces: as in ATen, without the underscore of in-place forms, or ``namespace::name``."""
    family: Family
    work: OperatorWork | None = None
    """Arithmetic, traffic and kernels of the operator; None: it costs nothing."""
    dims: Dims | None = None
    """Labels of the dims of its tensors, for shardings and cuts; None: every device runs the whole operator."""
    layouts: Layouts = "recorded"
    """Memory layouts that it reads and writes."""
    pieces: Pieces | None = None
    """Attributes that change with the pieces of its tensors."""
    processor: Measured | None = None
    """Measured operator that it is timed as on a CPU."""
    operations: int | None = None
    """Vector operations per element of an element-wise operator that a fused kernel can include; None: it cannot."""
    factors: tuple[str, str] | None = None
    """Names of the left and right factor of a product; any other tensor is added."""
    looks: bool = False
    """Its first output is a view of the storage of its first input."""
