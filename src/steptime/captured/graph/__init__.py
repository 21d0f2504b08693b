"""The graph IR: typed values, interned nodes, recorded programs, and lifetimes of storages."""

from steptime.captured.graph.program import (
    BEFORE,
    PHASES,
    Attribute,
    Call,
    Category,
    Graph,
    Node,
    Nodes,
    Parameter,
    Phase,
    Program,
    Storage,
    TensorType,
    Value,
    contiguous_strides,
    topological,
)
from steptime.model.spec import ELEMENT_BYTES, FLOATS

__all__ = [
    "BEFORE", "ELEMENT_BYTES", "FLOATS", "PHASES", "Attribute", "Call", "Category", "Graph", "Node", "Nodes",
    "Parameter", "Phase", "Program", "Storage", "TensorType", "Value", "contiguous_strides", "topological",
]  # fmt: skip
