"""Propagation of shardings from annotated tensors to all others.

Along each axis of the mesh an operator splits one of its dims or none. A tensor with a known sharding makes its
operators, forward and backward, split the same dim, and their other tensors follow. The levels of :data:`LEVELS` are
added one after another, each until nothing changes: element-wise operators, dims that pass through, products, splits
with communication inside. A weight alone decides for products, and after these for other operators, so that biases and
norms follow activations. The sharding of a parameter decides last for the computation of its gradient, if nothing else
has.

Shardings along different axes of one tensor are merged. Where two options meet in one operator, the first one stays; of
two at the same time, the one that agrees with more bytes of activations, then of weights. Tensors that nothing reaches
are replicated; a linear operator with partial sums as inputs gives partial sums where that takes less time.

Source: Xu et al., "GSPMD", arXiv 2105.04663, section 3.5: priorities, merging, fixed point.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from steptime.captured.ops import OPERATORS
from steptime.captured.ops.maps import Elementwise
from steptime.captured.ops.placement import Placement, R, Sharding, divides, shard
from steptime.num import Array
from steptime.sharding.annotate import Annotated, Annotation, agrees, resolved
from steptime.sharding.build import Built
from steptime.sharding.options import Option
from steptime.sharding.reshards import Reshard, keeping_terms, reshards_of
from steptime.sharding.tensors import Tensors, by_tensor, splits, tensors_of

LEVELS: Final = (
    "element-wise",
    "dims that pass through",
    "products",
    "splits with communication inside",
    "gradients as their update needs them",
)
PRODUCTS_LEVEL: Final = 2
"""Level at which a weight alone decides for a product."""
INSIDE_LEVEL: Final = 3
"""Level of splits with communication inside, at which a weight alone decides for any other operator."""
VIA: Final = 4
"""Number of operators that a text shows at each end of a path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The annotation from which a sharding came, and the operators on the way."""

    placement: Placement
    annotation: Annotation
    via: tuple[str, ...]

    def __str__(self) -> str:
        steps = self.via if len(self.via) <= 2 * VIA else (*self.via[:VIA], "...", *self.via[-VIA:])
        return f"{self.placement} of {self.annotation}" + (f" via {', '.join(steps)}" if steps else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Two shardings that reached the same tensor along the same axis."""

    tensor: str
    axis: str
    kept: Origin
    dropped: Origin

    def __str__(self) -> str:
        return f"{self.tensor}: along {self.axis} {self.kept}; dropped: {self.dropped}"


@dataclass(frozen=True, kw_only=True)
class Propagated:
    """An option for each item that follows from annotations."""

    choice: Array
    conflicts: tuple[Conflict, ...]
    reshards: tuple[Reshard, ...]
    """Resharded tensors, the most expensive first."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """Placement of a tensor along one axis, and its origin."""

    placement: Placement
    annotated: Annotated
    before: tuple[int, int] | None = None
    """The tensor from which it came, and the item in between; -1: a view or a reader."""


def propagated(built: Built, annotations: Sequence[Annotation]) -> Propagated:
    """Options of all items that follow from annotations.

    Raises:
        UserError: an annotation matches nothing, does not fit its tensor, or contradicts another one.
    """
    spread = _Spread(built, tensors_of(built.flow))
    spread.start(resolved(built, annotations))
    for level in range(len(LEVELS)):
        if level == len(LEVELS) - 1:
            spread.join_updates()
        while spread.sweep(level):
            pass
    choice = keeping_terms(built, spread.choice())
    return Propagated(choice=choice, conflicts=tuple(spread.conflicts()), reshards=reshards_of(built, choice))


def multiplies(op: str) -> bool:
    """True if an operator multiplies matrices."""
    return op in OPERATORS and OPERATORS[op].family in ("product", "attention", "convolution")


def level_of(op: str, option: Option) -> int:
    """Level of :data:`LEVELS` at which an operator takes an option."""
    if option.exchange is not None or option.masked:
        return INSIDE_LEVEL
    if multiplies(op):
        return PRODUCTS_LEVEL
    row = OPERATORS.get(op)
    return 0 if row is not None and isinstance(row.dims, Elementwise) else 1


def _weights(tensors: Tensors) -> set[int]:
    """Tensors that operators read from parameters, or from values made of parameters alone."""
    items, out = tensors.flow.items, set[int]()
    readers: dict[int, list[int]] = defaultdict(list)
    for link in tensors.flow.links:
        readers[link.source].append(tensors.inputs[link.target][link.input])
    for number, item in enumerate(items):
        if item.kind == "operator" and item.phase == "forward" and item.node.inputs:
            made_of_weights = out.issuperset(tensors.inputs[number])
        else:
            made_of_weights = item.kind == "source" and item.node.op == "parameter"
        out.update(readers[number] if made_of_weights else ())
    return out


class _Spread:
    def __init__(self, built: Built, tensors: Tensors) -> None:
        self.built, self.tensors = built, tensors
        self.items, self.sizes = built.flow.items, built.mesh.sizes
        self.axes = range(len(self.sizes))
        self.marks: list[list[_Mark | None]] = [[None] * len(self.sizes) for _ in tensors.types]
        self.fixed: set[int] = set()
        self.options = [splits(item) for item in self.items]
        self.chosen = [[0] * len(self.sizes) for _ in self.items]
        self.known = [{(way.inputs, way.outputs): n for n, way in enumerate(ways)} for ways in built.ways]
        self.updates = {tensors.inputs[n][0] for n, item in enumerate(self.items) if item.kind == "update"}
        parameters = {tensors.outputs[n][0] for n in built.flow.of_parameter.values()}
        self.ties = by_tensor(
            [t for t in tensors.ties if not self.updates & {t.first, t.second} or parameters & {t.first, t.second}]
        )
        self.weights = _weights(tensors)
        self.met: dict[tuple[int, int], tuple[_Mark, _Mark]] = {}
        """Tensor and axis -> its mark, and the first other mark that reached it."""

    def start(self, annotated: Iterable[Annotated]) -> None:
        """Mark the annotated tensors, which stay fixed."""
        all_marks = []
        for each in annotated:
            tensor = self.tensors.outputs[each.item][each.output]
            self.fixed.add(tensor)
            for axis, placement in enumerate(each.sharding):
                self.marks[tensor][axis] = _Mark(placement, each)
                all_marks.append((tensor, axis))
        for tensor, axis in all_marks:
            self._along_ties(tensor, axis)

    def join_updates(self) -> None:
        """From now on, gradients without a sharding take that of their update."""
        self.ties = by_tensor(self.tensors.ties)
        for tensor in self.updates:
            for axis in self.axes:
                self._along_ties(tensor, axis)

    def sweep(self, level: int) -> bool:
        """Visit all operators forward and backward; returns True if one took an option."""
        order = range(len(self.items))
        return sum(self._decide(item, level) for turn in (order, reversed(order)) for item in turn) > 0

    def _decide(self, item: int, level: int) -> bool:
        if len(self.options[item]) == 1:
            return False
        changed = False
        of_weights = PRODUCTS_LEVEL if multiplies(self.items[item].node.op) else INSIDE_LEVEL
        for axis in self.axes:
            if self.chosen[item][axis]:
                continue
            found = [
                (*self._agreeing_bytes(item, option, axis), -number)
                for number, option in enumerate(self.options[item])
                if number and level_of(self.items[item].node.op, option) <= level
            ]
            for activations, weights, number in sorted(found, reverse=True):
                if (activations or (weights and level >= of_weights)) and self._possible(item, axis, -number):
                    self._take(item, axis, -number)
                    changed = True
                    break
        return changed

    def _agreeing_bytes(self, item: int, option: Option, axis: int) -> tuple[int, int]:
        """Bytes of activations and of weights whose split along an axis agrees with an option."""
        found = [0, 0]
        for tensor, _ in self._agreeing(item, option, axis):
            found[tensor in self.weights] += max(self.tensors.types[tensor].size_bytes, 1)
        return found[0], found[1]

    def _agreeing(self, item: int, option: Option, axis: int) -> list[tuple[int, _Mark]]:
        return [
            (tensor, mark)
            for tensor, dim in self.tensors.ports(item, option)
            if dim is not None and (mark := self.marks[tensor][axis]) is not None and mark.placement.dim == dim
        ]

    def _possible(self, item: int, axis: int, number: int) -> bool:
        """True if the operator has this option with those of the other axes, and its annotated results allow it."""
        option = self.options[item][number]
        for tensor, placement in zip(self.tensors.outputs[item], option.outputs, strict=True):
            mark = self.marks[tensor][axis]
            if tensor in self.fixed and mark is not None and not agrees(mark.placement, placement):
                return False
        chosen = [number if other == axis else self.chosen[item][other] for other in self.axes]
        return self._shardings(item, chosen) in self.known[item]

    def _shardings(self, item: int, chosen: Sequence[int]) -> tuple[tuple[Sharding, ...], tuple[Sharding, ...]]:
        each = [self.options[item][number] for number in chosen]
        return (
            tuple(tuple(option.inputs[n] for option in each) for n in range(len(each[0].inputs))),
            tuple(tuple(option.outputs[n] for option in each) for n in range(len(each[0].outputs))),
        )

    def _take(self, item: int, axis: int, number: int) -> None:
        option = self.options[item][number]
        self.chosen[item][axis] = number
        start, mark = max(self._agreeing(item, option, axis), key=lambda each: self.tensors.types[each[0]].size_bytes)
        for tensor, dim in self.tensors.ports(item, option):
            if dim is None:
                continue
            if tensor != start and self._put(tensor, axis, _Mark(shard(dim), mark.annotated, (start, item))):
                self._along_ties(tensor, axis)

    def _put(self, tensor: int, axis: int, mark: _Mark) -> bool:
        """Give a tensor a mark if it has none and the mesh divides it; returns True if it got the mark."""
        marks = self.marks[tensor]
        now = marks[axis]
        if now is not None:
            if now.placement != mark.placement:
                self.met.setdefault((tensor, axis), (now, mark))
            return False
        others = (R if each is None else each.placement for each in marks)
        sharding = tuple(mark.placement if other == axis else each for other, each in enumerate(others))
        if not divides(self.tensors.types[tensor].shape, sharding, self.sizes):
            return False
        marks[axis] = mark
        return True

    def _along_ties(self, tensor: int, axis: int) -> None:
        waiting = [tensor]
        while waiting:
            here = waiting.pop()
            mark = self.marks[here][axis]
            if mark is None or mark.placement.dim is None:
                continue
            for tie in self.ties.get(here, ()):
                for a, b in tie.dims:
                    if a == mark.placement.dim and self._put(
                        tie.second, axis, _Mark(shard(b), mark.annotated, (here, -1))
                    ):
                        waiting.append(tie.second)

    # -- result ---------------------------------------------------------------------------------------------------

    def choice(self) -> Array:
        """Option of each item from its marks; replicated along axes without a mark."""
        out = []
        for number, (item, ways) in enumerate(zip(self.items, self.built.ways, strict=True)):
            if item.kind == "operator":
                out.append(self.known[number][self._shardings(number, self.chosen[number])])
                continue
            marks = self.marks[self.tensors.outputs[number][0]]
            sharding = tuple(R if mark is None else mark.placement for mark in marks)
            out.append(next(n for n, way in enumerate(ways) if way.outputs[0] == sharding))
        return np.array(out, int)

    def conflicts(self) -> list[Conflict]:
        """Tensors that two shardings reached: along ties, or because an operator splits another dim."""
        for item, chosen in enumerate(self.chosen):
            for axis, number in enumerate(chosen):
                if number:
                    self._against(item, axis, self.options[item][number])
        return [
            Conflict(
                tensor=self.tensors.text(tensor),
                axis=self.built.mesh.names[axis],
                kept=self._origin(kept, axis),
                dropped=self._origin(dropped, axis),
            )
            for (tensor, axis), (kept, dropped) in self.met.items()
        ]

    def _against(self, item: int, axis: int, option: Option) -> None:
        """Record tensors of an operator that are split by another dim than in its option."""
        agreeing = self._agreeing(item, option, axis)
        for tensor, dim in self.tensors.ports(item, option):
            mark = self.marks[tensor][axis]
            if mark is not None and mark.placement.dim is not None and mark.placement.dim != dim and agreeing:
                self.met.setdefault((tensor, axis), (agreeing[0][1], mark))

    def _origin(self, mark: _Mark, axis: int) -> Origin:
        via: list[str] = []
        at: _Mark | None = mark
        while at is not None and at.before is not None:
            tensor, item = at.before
            via += [self.items[item].name] if item >= 0 else []
            at = self.marks[tensor][axis]
        return Origin(placement=mark.placement, annotation=mark.annotated.annotation, via=tuple(reversed(via)))
