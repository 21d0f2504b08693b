"""Captured graphs as terms of the rule language.

An operator is a term where rules know it, for one float type or as a movement; everything else is a leaf, weights among
them. Values are equal whatever their strides; equal terms are one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from steptime.captured.graph import Node, TensorType, Value, topological
from steptime.captured.graph.program import SOURCES
from steptime.lab.rules.lowering import LEAF, MOVEMENTS, shape_of
from steptime.lab.rules.meanings import MEANINGS
from steptime.model.spec import FLOATS
from steptime.rewrite.flow import Flow, is_pure

Attribute: TypeAlias = int | float | str


@dataclass(frozen=True, slots=True)
class Row:
    """A term over the numbers of others."""

    op: str
    attributes: tuple[Attribute, ...]
    children: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    steady: bool
    """It is the same in every run: a weight, or made of weights alone."""


class Terms:
    """The terms of a graph by number."""

    def __init__(self, flow: Flow) -> None:
        self.rows: list[Row] = []
        self.having: dict[str, list[int]] = defaultdict(list)
        """Operator -> numbers of its terms."""
        self.values: dict[int, list[Value]] = defaultdict(list)
        """Number -> values of the graph that are equal to it."""
        self._flow = flow
        self._known: dict[object, int] = {}
        self._numbers: dict[Value, int] = {}
        for node in flow.order:
            self._node(node)
        for value, number in self._numbers.items():
            self.values[number].append(value)

    def of(self, value: Value) -> int:
        """The number of a value."""
        for node in topological([value.node]) if value not in self._numbers else ():
            self._node(node)
        return self._numbers[value]

    def make(self, op: str, attributes: tuple[Attribute, ...], *children: int | None) -> int | None:
        """The number of an operator on terms; None where an argument is missing or the types do not fit it.

        What moves nothing is its argument.
        """
        given = tuple(each for each in children if each is not None)
        if len(given) != len(children):
            return None
        known = self._known.get((op, attributes, given))
        if known is not None:
            return known
        rows = [self.rows[each] for each in given]
        dtype, shapes = rows[0].dtype, tuple(each.shape for each in rows)
        if any(each.dtype != dtype for each in rows) or (op not in MOVEMENTS and dtype not in FLOATS):
            return None
        shape = shape_of(op, attributes, shapes)
        if shape is None:
            return None
        if shape == shapes[0] and _moves_nothing(op, attributes, len(given)):
            return given[0]
        return self._add(Row(op, attributes, given, shape, dtype, all(each.steady for each in rows)))

    def _add(self, row: Row, key: object = None) -> int:
        number = self._known.setdefault(key or (row.op, row.attributes, row.children), len(self.rows))
        if number == len(self.rows):
            self.rows.append(row)
            self.having[row.op].append(number)
        return number

    def _node(self, node: Node) -> None:
        if node.value() in self._numbers or not node.outputs:
            return
        definitions: Mapping[str, Value] = self._flow.definitions
        behind = definitions.get(str(node.attribute("name", ""))) if node.op == "constant" else None
        if behind is not None:
            self._numbers[node.value()] = self.of(behind)
            return
        given = [self._numbers[value] for value in node.inputs]
        meaning = MEANINGS.get(node.op) if is_pure(node) else None
        made = None if meaning is None else meaning(self, node, given)
        for index, type in enumerate(node.outputs):
            value, number = node.value(index), made[index] if made else None
            fits = number is not None and _is(self.rows[number], type)
            self._numbers[value] = number if fits and number is not None else self._leaf(value)

    def _leaf(self, value: Value) -> int:
        node, type = value.node, value.type
        steady = node in self._flow.constant or node.op == "constant"
        if node.op not in SOURCES:
            steady = is_pure(node) and all(self.rows[self._numbers[each]].steady for each in node.inputs)
        return self._add(Row(LEAF, (), (), type.shape, type.dtype, steady), value)


def _is(row: Row, type: TensorType) -> bool:
    return (row.shape, row.dtype) == (type.shape, type.dtype)


def _moves_nothing(op: str, attributes: tuple[Attribute, ...], arity: int) -> bool:
    if op in ("reshape", "slice", "expand", "pad", "enlarge"):
        return True
    if op == "permute":
        return attributes == tuple(range(-len(attributes), 0))
    return (op == "concat" and arity == 1) or (op == "scale" and attributes == (1,))
