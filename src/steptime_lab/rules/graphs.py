"""Captured graphs as terms of the rule language.

An operator that rules know, for one float type or as a movement, is a term; everything else, including weights, is a
variable. Strides of values do not matter; equal terms are one object.
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from functools import lru_cache
from typing import Final

from steptime.captured.graph import Node, Value, topological
from steptime.captured.graph.program import SOURCES
from steptime.errors import UserError
from steptime.model.spec import FLOATS
from steptime.rewrite.flow import Flow, is_pure
from steptime_lab.rules.meanings import MEANINGS
from steptime_lab.rules.operators import OPERATORS
from steptime_lab.rules.sizes import Condition, Size, size
from steptime_lab.rules.terms import Shape, Term, term, variable

MOVEMENTS: Final = frozenset({"concat", "slice", "pad", "enlarge", "transpose", "permute", "reshape", "expand"})
"""Operators for which rules hold with every element type."""
NO_KERNEL: Final = frozenset({"slice", "transpose", "permute", "reshape", "expand"})


class Terms:
    """The terms of a graph."""

    def __init__(self, flow: Flow) -> None:
        self.shapes: dict[Term, Shape] = {}
        self.having: dict[str, list[Term]] = defaultdict(list)
        """Operator -> its terms."""
        self.values: dict[Term, list[Value]] = defaultdict(list)
        """Term -> equal values of the graph."""
        self.steady: set[Term] = set()
        """Terms with the same value in every run: weights, and terms made of weights alone."""
        self._flow = flow
        self._dtypes: dict[Term, str] = {}
        self._terms: dict[Value, Term] = {}
        for node in flow.order:
            self._node(node)
        for value, found in self._terms.items():
            self.values[found].append(value)
        self.first = {found: values[0] for found, values in self.values.items()}

    def of(self, value: Value) -> Term:
        """The term of a value."""
        for node in topological([value.node]) if value not in self._terms else ():
            self._node(node)
        return self._terms[value]

    def make(self, op: str, attributes: tuple[float, ...], *children: Term | None) -> Term | None:
        """An operator on terms; None: an argument is missing or has an unsuitable type.

        A movement without effect is its argument.
        """
        given = tuple(each for each in children if each is not None)
        if len(given) != len(children):
            return None
        sizes = tuple(size(each if isinstance(each, int) else Fraction(each)) for each in attributes)
        made = term(op, given, sizes)
        if made in self.shapes:
            return made
        dtype, shapes = self._dtypes[given[0]], tuple(self.shapes[each] for each in given)
        if any(self._dtypes[each] != dtype for each in given) or (op not in MOVEMENTS and dtype not in FLOATS):
            return None
        shape = _shape(op, sizes, shapes)
        if shape is None:
            return None
        if shape == shapes[0] and _moves_nothing(op, sizes, len(given)):
            return given[0]
        self._add(made, shape, dtype, all(each in self.steady for each in given))
        return made

    def closed(self, pattern: Term, given: Term) -> bool:
        """True if a pattern may not look into a term, as terms made of weights cost nothing in any form."""
        return given in self.steady and pattern.op not in NO_KERNEL

    def _add(self, made: Term, shape: Shape, dtype: str, steady: bool) -> None:
        self.shapes[made], self._dtypes[made] = shape, dtype
        self.having[made.op].append(made)
        if steady:
            self.steady.add(made)

    def _node(self, node: Node) -> None:
        if node.value() in self._terms or not node.outputs:
            return
        definitions = self._flow.definitions
        behind = definitions.get(str(node.attribute("name", ""))) if node.op == "constant" else None
        if behind is not None:
            self._terms[node.value()] = self.of(behind)
            return
        given = [self._terms[value] for value in node.inputs]
        meaning = MEANINGS.get(node.op) if is_pure(node) else None
        made = None if meaning is None else meaning(self, node, given)
        for index, type in enumerate(node.outputs):
            value, found = node.value(index), made[index] if made else None
            fits = found is not None and self.shapes[found] == tuple(map(size, type.shape))
            same = fits and found is not None and self._dtypes[found] == type.dtype
            self._terms[value] = found if same and found is not None else self._leaf(value)

    def _leaf(self, value: Value) -> Term:
        node, type = value.node, value.type
        steady = node in self._flow.constant or node.op == "constant"
        if node.op not in SOURCES:
            steady = is_pure(node) and all(self._terms[each] in self.steady for each in node.inputs)
        made = variable(f"{node.number}.{value.index}")
        self._add(made, tuple(map(size, type.shape)), type.dtype, steady)
        return made


@lru_cache(maxsize=2**17)
def _shape(op: str, attributes: tuple[Size, ...], shapes: tuple[Shape, ...]) -> Shape | None:
    """Shape of an operator's result for numeric shapes; None: it does not accept them."""
    needs: list[Condition] = []
    try:
        dims = OPERATORS[op].shape(attributes, list(shapes), needs)
    except (UserError, IndexError):
        return None
    return dims if all(each.holds({}) for each in needs) else None


def _moves_nothing(op: str, attributes: tuple[Size, ...], arity: int) -> bool:
    if op in ("reshape", "slice", "expand", "pad", "enlarge"):
        return True
    if op == "permute":
        return attributes == tuple(map(size, range(-len(attributes), 0)))
    return (op == "concat" and arity == 1) or (op == "scale" and attributes[0].number == 1)
