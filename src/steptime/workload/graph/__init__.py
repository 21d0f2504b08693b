"""The graph IR: typed values, interned nodes, recorded programs, and how long each storage lives."""

from steptime.workload.element_types import ELEMENT_BYTES, FLOATS
from steptime.workload.graph.node import Attribute, Graph, Node, Nodes, Value, topological
from steptime.workload.graph.program import BEFORE, PHASES, Call, Category, Parameter, Phase, Program, Storage
from steptime.workload.graph.types import TensorType, contiguous_strides

__all__ = [
    "BEFORE", "ELEMENT_BYTES", "FLOATS", "PHASES", "Attribute", "Call", "Category", "Graph", "Node", "Nodes",
    "Parameter", "Phase", "Program", "Storage", "TensorType", "Value", "contiguous_strides", "topological",
]  # fmt: skip
