"""Whose memory a value is: views share the storage of what they look at."""

from __future__ import annotations

from collections.abc import Iterable

from steptime.captured.aten.layout import VIEWS
from steptime.captured.graph.node import Value


def root(value: Value) -> Value:
    """The value whose storage this one shares; itself where it has its own."""
    while value.node.op in VIEWS and value.node.inputs:
        value = value.node.inputs[0]
    return value


def storages(values: Iterable[Value]) -> tuple[Value, ...]:
    """The values that own the storages of these, each once, in order."""
    return tuple(dict.fromkeys(root(value) for value in values))
