"""Attributes of the operator that one device runs, from the pieces of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from steptime.captured.graph import Attribute, Node, TensorType

Types = Sequence[TensorType]


def shape_of_output(*names: str) -> Callable[[Node, Types, Types], Mapping[str, Attribute]]:
    """Attributes that are the shape of the result."""
    return lambda node, inputs, outputs: {name: outputs[0].shape for name in names if node.attribute(name) is not None}
