"""Cut of a module over tensor ranks: pairs of products with weights, and the part of each weight on one rank.

A product of a whole activation with a weight is cut by columns, a product of a cut activation by rows (its output is
then a sum over the ranks). Where an operator needs the whole of a value that is cut, the weights to blame are left
whole and the walk starts again; the first attempt without blame is the result. For a transformer block it is the cut of
Shoeybi et al., arXiv 1909.08053.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, gcd
from typing import Final

from steptime.captured.cut.rules import (
    ADDITIONS,
    FEW,
    WHOLE,
    Layout,
    Uncut,
    followed,
    of_view,
    origins_of,
    parameter_of,
)
from steptime.captured.cut.sections import Blocks, Sections
from steptime.captured.graph import Call, Node, Parameter, Value
from steptime.captured.graph.program import SOURCES
from steptime.captured.ops import OPERATORS, VIEWS
from steptime.captured.ops.views import turned
from steptime.model.captured import NOTHING, Line, Way, line
from steptime.num import divisors

MOST_RANKS: Final = 1024
LOSS_NUMBERS: Final = 3
"""Numbers per row that ranks with some classes each exchange: maximum, sum, and the score of the label."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A sum over the tensor ranks that is finished before a call."""

    value: Value
    numbers: int | None = None
    """Count of fp32 numbers per row that are exchanged; None: the whole value."""


@dataclass(slots=True)
class Cutting:
    """Layouts of all values of a module that is cut over tensor ranks."""

    weights: dict[str, int] = field(default_factory=dict)
    """Parameter -> dim along which it is cut."""
    layouts: dict[Node, list[Layout]] = field(default_factory=dict)
    exchanges: dict[Node, list[Exchange]] = field(default_factory=dict)
    """Operator -> sums over ranks that are finished before it."""
    pairs: set[str] = field(default_factory=set)
    """Families of weights that are cut by rows."""
    vocabulary: set[str] = field(default_factory=set)
    """Families of weights that are cut over a vocabulary, whose last part may be smaller."""

    def of(self, value: Value) -> Layout:
        """Layout of a value."""
        found = self.layouts.get(value.node)
        return found[value.index] if found is not None else WHOLE

    @property
    def sizes(self) -> set[int]:
        """Sizes of the dims that are cut, except for a vocabulary."""
        out = set()
        for node, layouts in self.layouts.items():
            for layout, output in zip(layouts, node.outputs, strict=True):
                if layout.dim is not None and not layout.origins <= self.vocabulary:
                    out.add(output.shape[layout.dim])
        return out

    @property
    def ranks(self) -> tuple[int, ...]:
        """Numbers of ranks that divide every dim that is cut; only 1 without a pair."""
        if not self.pairs:
            return (1,)
        return tuple(n for n in divisors(gcd(*self.sizes)) if n <= MOST_RANKS)


def cutting_of(sections: Sections) -> Cutting:
    """The cut of a program in which no operator needs the whole of a value that is cut.

    A dim of size two or three may count heads, or projections that one weight joins: the interpretation with more pairs
    is the result.
    """
    found = [_unblamed(sections, few) for few in (0, FEW)]
    best = max(found, key=lambda cutting: len(cutting.pairs))
    return best if _alike(best, sections.blocks) else Cutting()


def _alike(cutting: Cutting, blocks: Blocks | None) -> bool:
    """True if all blocks are cut in the same way, so that no pair reaches from one block into the next."""
    dims: dict[str, set[int]] = {}
    for name, dim in cutting.weights.items():
        dims.setdefault(family(name, blocks), set()).add(dim)
    return all(len(each) == 1 for each in dims.values())


def _unblamed(sections: Sections, few: int) -> Cutting:
    whole: set[str] = set()
    while True:
        attempt = _Attempt(sections, frozenset(whole), few)
        try:
            attempt.follow()
        except Uncut as blamed:
            if not blamed.origins or blamed.origins <= whole:
                return Cutting()
            whole |= blamed.origins
            continue
        return attempt.cutting


def family(name: str, blocks: Blocks | None) -> str:
    """Name of a parameter without its block: equal for all blocks."""
    if blocks is None or blocks.index_of(name) is None:
        return name
    return f"{blocks.container}.*.{blocks.inside(name)}"


class _Attempt:
    """One walk through the operators in execution order."""

    def __init__(self, sections: Sections, whole: frozenset[str], few: int) -> None:
        self.sections, self.whole, self.few = sections, whole, few
        self.cutting = Cutting()
        self.finished: set[Value] = set()
        nodes = [call.node for call in sections.program.calls]
        self.heads = frozenset(
            value.type.shape[1] for node in nodes if "attention" in node.op for value in node.inputs[:3]
            if len(value.type.shape) == 4
        )  # fmt: skip
        tables = [node.inputs[0].type for node in nodes if node.op == "embedding"]
        self.table = max((t.shape for t in tables), key=lambda shape: shape[0] * shape[-1], default=())

    def follow(self) -> None:
        """Find the layout of every value.

        Raises:
            Uncut: some weights must stay whole.
        """
        for call in self.sections.program.calls:
            if call.node not in self.cutting.layouts and call.phase != "optimizer":
                self._lay(call)

    def _lay(self, call: Call) -> None:
        node = call.node
        if call.phase == "forward":
            self._decide(node)
            self._cut_operands(node)
        given = [self._of(value) for value in node.inputs]
        if any(each.partial for each in given) and not self._waits(node, given):
            given = [self._finish(node, v) if g.partial else g for v, g in zip(node.inputs, given, strict=True)]
        self.cutting.layouts[node] = self._out(node, given)

    def _out(self, node: Node, given: list[Layout]) -> list[Layout]:
        if node.op == "embedding_dense_backward" and self._is_cut_table(node):
            return [Layout(0, origins=frozenset(self._table_names()))]
        if all(each.whole for each in given):
            return [WHOLE] * len(node.outputs)
        if node.op in VIEWS:
            return [of_view(node, index, given[0], self.heads, self.few) for index in range(len(node.outputs))]
        if any(each.partial for each in given):
            return [Layout(partial=True, origins=origins_of(given))] * len(node.outputs)
        out = followed(node, given)
        self._note_classes(node, given)
        return out

    def _note_classes(self, node: Node, given: list[Layout]) -> None:
        """Note the exchange of a softmax over classes that are cut: a few numbers per row."""
        if node.op == "_log_softmax" and given[0].dim == len(node.inputs[0].type.shape) - 1:
            self.cutting.vocabulary |= given[0].origins
            self.cutting.exchanges.setdefault(node, []).append(Exchange(node.inputs[0], LOSS_NUMBERS))

    def _of(self, value: Value) -> Layout:
        """Layout of an input; a node without a call is a view of a value that was written."""
        node = value.node
        if node not in self.cutting.layouts:
            if node.op in SOURCES:
                dim = self.cutting.weights.get(str(node.attribute("name"))) if node.op == "parameter" else None
                origins = frozenset({self._family(str(node.attribute("name")))})
                return WHOLE if dim is None else Layout(dim, origins=origins)
            given = [self._of(each) for each in node.inputs]
            if any(not each.whole for each in given):
                raise Uncut(origins_of(given))
            self.cutting.layouts[node] = [WHOLE] * len(node.outputs)
        found = self.cutting.layouts[node][value.index]
        return WHOLE if found.partial and _root(value) in self.finished else found

    # -- sums over ranks ----------------------------------------------------------------------------------------------

    @staticmethod
    def _waits(node: Node, given: list[Layout]) -> bool:
        """True if an operator can run before a sum over ranks is finished."""
        return node.op in VIEWS or (node.op in ADDITIONS and all(each.dim is None for each in given))

    def _finish(self, node: Node, value: Value) -> Layout:
        """Finish a sum over ranks for an operator, unless it was finished before."""
        root = _root(value)
        if root not in self.finished:
            self.finished.add(root)
            self.cutting.exchanges.setdefault(node, []).append(Exchange(root))
        return WHOLE

    # -- which weights are cut ----------------------------------------------------------------------------------------

    def _family(self, name: str) -> str:
        return family(name, self.sections.blocks)

    def _decide(self, node: Node) -> None:
        if node.op == "embedding":
            self._decide_table(node)
        row = OPERATORS.get(node.op)
        if row is None or row.factors is None or len(node.outputs[0].shape) != 2:
            return
        given, weight = (node.input(name) for name in row.factors)
        found = None if weight is None else parameter_of(weight)
        if given is None or weight is None or found is None:
            return
        name, looks = found
        if name in self.cutting.weights or self._family(name) in self.whole or "view" in looks:
            return
        layout = self._of(given)
        if layout.dim is None:
            self._cut(name, 1 - turned(weight), weight)
            self._cut_bias(node, row.factors)
        elif layout.dim == 1:
            self._cut(name, int(turned(weight)), weight)
            self.cutting.pairs.add(self._family(name))

    def _cut(self, name: str, dim: int, weight: Value) -> None:
        self.cutting.weights[name] = dim
        for node in _chain(weight):
            self.cutting.layouts.pop(node, None)
        for node in reversed(list(_chain(weight))):
            given = self._of(node.inputs[0])
            same = node.op in ("detach", "alias", "_to_copy")
            self.cutting.layouts[node] = [given if same else of_view(node, 0, given, self.heads, self.few)]

    def _cut_bias(self, node: Node, factors: tuple[str, str]) -> None:
        for name, bias in zip(node.names, node.inputs, strict=True):
            found = None if name in factors else parameter_of(bias)
            if found is not None and len(bias.type.shape) == 1:
                self._cut(found[0], 0, bias)

    def _cut_operands(self, node: Node) -> None:
        """Cut a bias or scale with the operand of an operator that is cut along its last dim."""
        if node.op not in ("add", "mul"):
            return
        cut = {each.dim for v in node.inputs for each in [self._of(v)] if each.dim == len(v.type.shape) - 1}
        for value in node.inputs if cut else ():
            found = parameter_of(value)
            if found is not None and len(value.type.shape) == 1 and found[0] not in self.cutting.weights:
                self._cut(found[0], 0, value)

    def _decide_table(self, node: Node) -> None:
        weight = node.inputs[0]
        found = parameter_of(weight)
        if found is None or weight.type.shape != self.table or self._family(found[0]) in self.whole:
            return
        self.cutting.vocabulary.add(self._family(found[0]))
        if found[0] not in self.cutting.weights:
            self._cut(found[0], 0, weight)

    def _is_cut_table(self, node: Node) -> bool:
        return node.outputs[0].shape == self.table and any(True for _ in self._table_names())

    def _table_names(self) -> Iterator[str]:
        nodes = (call.node for call in self.sections.program.calls if call.node.op == "embedding")
        found = {parameter_of(node.inputs[0]) for node in nodes if node.inputs[0].type.shape == self.table}
        return iter({self._family(each[0]) for each in found if each and each[0] in self.cutting.weights})


def _root(value: Value) -> Value:
    """Value at the root of a chain of views."""
    while value.node.op in VIEWS and value.node.inputs:
        value = value.node.inputs[0]
    return value


def _chain(value: Value) -> Iterator[Node]:
    """Views from a value back to its parameter."""
    node = value.node
    while node.op not in SOURCES:
        yield node
        node = node.inputs[0].node


@dataclass(frozen=True, slots=True)
class Held:
    """Parameters of one operator, by way of cutting."""

    trained: Line
    replicated: Line
    frozen: Line
    tied: bool
    """They also belong to another part, which counts them on the same stage."""


def weights_of(
    sections: Sections, cutting: Cutting, ways: Sequence[Way], part: int, calls: Sequence[int]
) -> dict[int, Held]:
    """First call of a part that reads some parameters -> these parameters.

    A block has the parameters below its own path. Others belong to the head, or to the tail if only the tail reads
    them; parameters that both read are in both, as tied in the tail. Parameters without a reader go to the first call.
    """
    program = sections.program
    read = [_first_reads(sections, calls)]
    if sections.blocks is not None:
        read += [_first_reads(sections, each) for each in (sections.head, sections.tail)]
    groups: dict[tuple[int, bool], list[Parameter]] = {}
    for parameter in {each.storage: each for each in program.parameters}.values():
        place = _place(sections, parameter, part, read)
        if place is not None:
            groups.setdefault((read[0].get(parameter.storage, calls[0]), place), []).append(parameter)
    out: dict[int, Held] = {}
    for (call, tied), members in groups.items():
        # A call that reads a tied and another weight counts both as its own.
        earlier = out.get(call)
        found = _held(members, sections, cutting, ways, tied)
        out[call] = found if earlier is None else Held(
            earlier.trained.plus(found.trained), earlier.replicated.plus(found.replicated),
            earlier.frozen.plus(found.frozen), False,
        )  # fmt: skip
    return out


def _first_reads(sections: Sections, calls: Sequence[int]) -> dict[int, int]:
    """Storage -> first call that computes with it."""
    out: dict[int, int] = {}
    for number in sorted(calls):
        call = sections.program.calls[number]
        for storage in () if call.view else call.reads:
            out.setdefault(storage, number)
    return out


def _place(sections: Sections, parameter: Parameter, part: int, read: list[dict[int, int]]) -> bool | None:
    """True if a parameter of the part is tied; None if it belongs to another part."""
    if sections.blocks is None:
        return False
    owner = sections.blocks.index_of(parameter.name)
    if owner is not None or 0 <= part < len(sections.each):
        return False if owner == part else None
    in_head, in_tail = parameter.storage in read[1], parameter.storage in read[2]
    if part == -1:
        return False if in_head or not in_tail else None
    return in_head if in_tail else None


def _held(members: Sequence[Parameter], sections: Sections, cutting: Cutting, ways: Sequence[Way], tied: bool) -> Held:
    sums = [[0.0] * len(ways) for _ in range(3)]
    cut = {family(name, sections.blocks) for name in cutting.weights}
    for parameter in members:
        whole = family(parameter.name, sections.blocks) not in cut
        for index, (tp, _) in enumerate(ways):
            # Only a vocabulary need not be a multiple of the ranks; a whole number of elements is near enough.
            local = float(parameter.elements if whole else ceil(parameter.elements / tp))
            sums[0 if parameter.trained else 2][index] += local
            if parameter.trained and whole:
                sums[1][index] += local
    zero = [0.0] * len(ways)
    trained, replicated, frozen = (line(each, zero) if any(each) else NOTHING for each in sums)
    return Held(trained, replicated, frozen, tied)
