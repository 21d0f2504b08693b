"""What the operators of a recorded module cost, as lines over the micro-batch, on every number of tensor ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from steptime.captured.cost import Work, work_of
from steptime.captured.cut.cutting import Cutting
from steptime.captured.cut.rules import MAPS
from steptime.captured.cut.sections import Sections
from steptime.captured.graph import Call, Node, TensorType, Value
from steptime.errors import UserError
from steptime.model.captured import Line, Way, line

TOLERANCE: Final = 1e-6
PADDING: Final = 0.01
"""Share by which bytes may miss the line: workspaces are rounded up."""
_NORMS = ("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward")
_BY_TOKEN = MAPS | frozenset((*_NORMS, "sum", "mean"))
"""Operators that work on single tokens, if they do not touch the dim of tokens."""


@dataclass(frozen=True, slots=True)
class Costed:
    """One call: its work by way at two micro-batches."""

    node: Node
    works: tuple[tuple[Work, Work], ...]
    by_token: bool


class Costs:
    """Costs of the calls of one module, which was recorded at three micro-batches."""

    def __init__(self, recorded: Sequence[Sections], batches: tuple[int, ...], cutting: Cutting) -> None:
        self.sections, self.batches, self.cutting = recorded[0], batches, cutting
        self.program = recorded[0].program
        self.nodes = [[call.node for call in each.program.calls] for each in recorded]
        self.shares = self.shares_tokens()
        self.ways: tuple[Way, ...] = (
            (1, 0), *((n, s) for n in cutting.ranks if n > 1 for s in ((0, 1) if self.shares else (0,)))
        )  # fmt: skip
        self.unknown: Counter[str] = Counter()
        self._costs: dict[Node, Costed] = {}

    # -- lines --------------------------------------------------------------------------------------------------------

    def through(self, low: Sequence[float], high: Sequence[float]) -> Line:
        """The line through sizes at the first two micro-batches, by way."""
        b0, b1 = self.batches[:2]
        slopes = [(h - v) / (b1 - b0) for v, h in zip(low, high, strict=True)]
        return line([v - s * b0 for v, s in zip(low, slopes, strict=True)], slopes)

    def _shared(self, at: Line, by_token: bool) -> Line:
        """Work on single tokens is shared out where the ranks share the tokens."""
        if not by_token or not self.shares:
            return at
        parts = [tp if sp else 1 for tp, sp in self.ways]
        return line(
            (at.constant[w % len(at.constant)] for w in range(len(parts))),
            (at.slope[w % len(at.slope)] / parts[w] for w in range(len(parts))),
        )

    def size(self, costed: Costed, value: Callable[[Work], float]) -> Line:
        """A size of an operator on one rank."""
        pairs = [(float(value(low)), float(value(high))) for low, high in costed.works]
        return self._shared(self.through(*zip(*pairs, strict=True)), costed.by_token)

    # -- how operators are cut ----------------------------------------------------------------------------------------

    def by_token(self, node: Node) -> bool:
        """Whether a node works on whole activations token by token."""
        cutting = self.cutting
        touched = [cutting.of(value) for value in node.inputs] + list(cutting.layouts.get(node, []))
        if any(each.dim is not None for each in touched) or node.op not in _BY_TOKEN or not node.inputs:
            return False
        if node.op in ("sum", "mean"):
            rank = len(node.inputs[0].type.shape)
            over = node.attribute("dim")
            return isinstance(over, tuple) and all(
                isinstance(d, int) and (d % rank == rank - 1 or len(node.outputs[0].shape) <= 2) for d in over
            )
        return True

    def shares_tokens(self) -> bool:
        """Whether in a block everything that is not cut works on single tokens."""
        if len(self.cutting.ranks) < 2:
            return False
        numbers = self.sections.each[self.sections.typical] if self.sections.each else self.sections.head
        for number in numbers:
            call = self.program.calls[number]
            node, larger = call.node, self.nodes[1][number]
            grows = any(a.elements != b.elements for a, b in zip(node.outputs, larger.outputs, strict=True))
            whole = all(self.cutting.of(v).dim is None for v in node.inputs)
            made = all(each.dim is None for each in self.cutting.layouts.get(node, []))
            if not call.view and grows and whole and made and not self.by_token(node) and work_of(node).moved_bytes:
                return False
        return True

    def _local(self, value: Value, large: Value, tp: int) -> TensorType:
        """Type of a value on one of so many ranks; ``large`` is the same value at another micro-batch."""
        dim, type = self.cutting.of(value).dim, large.type
        if dim is None or tp == 1:
            return type
        shape = (*type.shape[:dim], ceil(type.shape[dim] / tp), *type.shape[dim + 1 :])
        return TensorType(shape, type.dtype, type.strides)

    def _local_node(self, number: int, recording: int, tp: int) -> Node:
        node, large = self.nodes[0][number], self.nodes[recording][number]
        if tp == 1:
            return large
        stand_ins: dict[Value, Value] = {}
        for value, other in zip(node.inputs, large.inputs, strict=True):
            if other not in stand_ins:
                type = self._local(value, other, tp)
                stand_ins[other] = Node("constant", (), (), (), (type,), 0).value()
        outputs = tuple(
            self._local(Value(node, n), Value(large, n), tp) for n in range(len(large.outputs))
        )  # fmt: skip
        inputs = tuple(stand_ins[other] for other in large.inputs)
        return Node(large.op, inputs, large.names, large.attributes, outputs, 0)

    # -- costs --------------------------------------------------------------------------------------------------------

    def costed(self, number: int, call: Call) -> Costed:
        """Cost of a call; calls of one node cost the same.

        Raises:
            UserError: a size is not affine in the micro-batch.
        """
        node = call.node
        if node not in self._costs:
            by_rank = {
                tp: tuple(work_of(self._local_node(number, r, tp), inplace=call.inplace) for r in (0, 1))
                for tp in self.cutting.ranks
            }
            works = tuple((by_rank[tp][0], by_rank[tp][1]) for tp, _ in self.ways)
            self._costs[node] = Costed(node, works, self.by_token(node))
            self._check(number, call, works[0])
        return self._costs[node]

    def _check(self, number: int, call: Call, works: tuple[Work, Work]) -> None:
        """The third recording lies on the line."""
        third = work_of(self.nodes[2][number], inplace=call.inplace)
        for name in ("matrix_flops", "vector_flops", "moved_bytes"):
            low, high, found = (float(getattr(work, name)) for work in (*works, third))
            expected = float(self.through([low], [high]).at(0, self.batches[2]))
            allowed = PADDING if name == "moved_bytes" else TOLERANCE
            if abs(expected - found) > allowed * max(found, 1.0):
                raise UserError(
                    f"{self.program.name}: {name} of {call.node.op} in {call.module or '(top)'} are not affine in the "
                    f"samples: {low:g}, {high:g}, {found:g} for {', '.join(map(str, self.batches))}",
                    hint="inputs_of_batch must change the number of samples only",
                )  # fmt: skip
        if works[0].family == "unknown":
            self.unknown[call.node.op] += 1
